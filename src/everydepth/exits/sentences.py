"""The additional files that sentence-transformers needs for an encoder."""

from __future__ import annotations

import json
from pathlib import Path

from everydepth.stream import ResidualStream

_MODES = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}


def write_pooling(stream: ResidualStream, width: int, folder: Path) -> str:
    """Make an encoder's folder loadable with `SentenceTransformer(folder)`; returns usage.

    Uses module names that every release of sentence-transformers understands.
    """
    token = stream.options.get("token", "mean")
    home = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{home}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{home}.Pooling"},
    ]
    pooling = {mode: name == token for name, mode in _MODES.items()}
    (folder / "1_Pooling").mkdir()
    for name, values in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": width, **pooling}),
        ("sentence_bert_config.json", {"max_seq_length": stream.positions}),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return (
        "from sentence_transformers import SentenceTransformer\n\n"
        'model = SentenceTransformer("this directory")\n'
        'model.encode(["a sentence", "another"])'
    )
