"""Load the data named on a command line, in the form a model expects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.environment import usable_device
from everydepth.errors import DataError, SettingError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from everydepth.data import Batch, Batches, Corpus, Images, Points, Rows, Table, Texts
    from everydepth.data.batches import Transform


@dataclass(frozen=True)
class Columns:
    """The columns of a table with the text, a second text, and the class."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None

    def of(self, table: Table) -> Columns | None:
        """These, with defaults for those not given; None if the text column is ambiguous.

        The class is the column label or labels. The text is the column text, or the only one or two
        other columns.
        """
        if self.text is not None:
            return self
        label = self.label or next((n for n in ("label", "labels") if n in table.columns), None)
        words = [name for name in table.columns if name != label]
        if "text" in words:
            return Columns("text", self.pair, label)
        if len(words) == 1 or (label is not None and len(words) == 2):
            return Columns(words[0], self.pair or (*words, None)[1], label)
        return None


def load_to_run(source: str, device: str | None = None, *, learns: bool = False) -> PreTrainedModel:
    """A model in the arithmetic it can run in: float16 becomes float32 to learn, and on a CPU,
    which takes several times as long with it."""
    import torch

    from everydepth.exits.load import load
    from everydepth.progress import say

    network = load(source)
    slow = usable_device(device or "cpu").type == "cpu"
    if (learns or slow) and any(p.dtype == torch.float16 for p in network.parameters()):
        say(f"{source} is in float16; it {'learns' if learns else 'runs'} in float32 here")
        network = network.float()
    return network


def load_data(
    data: str, split: str, *, root: str | None = None, columns: Columns | None = None
) -> Images | Texts | Corpus | Points:
    """Data by name or path; a table gives the texts in its columns."""
    from everydepth.data import Table, Texts, load
    from everydepth.data.catalog import has_columns
    from everydepth.data.tables import table_texts

    asked, own = columns or Columns(), has_columns(data)
    given = {name: value for name, value in vars(asked).items() if own and value is not None}
    found = load(data, split, root=root, **given)
    if isinstance(found, Table):
        chosen = asked.of(found)
        if chosen is None:
            raise DataError(
                f"{data!r} is a table with the columns {', '.join(found.columns)}; give the one "
                "with the text as --text, and the one with the class as --label"
            )
        labeled = chosen.label is not None
    elif asked != Columns() and not own:
        raise SettingError(f"{data!r} is not a table; leave out --text, --pair and --label")
    elif own and isinstance(found, Texts):
        chosen, labeled = asked, found.labels is not None
    else:
        return found
    classes = None
    if labeled and split != "train" and not Path(data).is_file():
        # A split may lack a class, so all splits use the class numbers of the training split.
        classes = load_data(data, "train", root=root, columns=columns)
        classes = classes.classes if isinstance(classes, Texts) else None
    if isinstance(found, Texts):
        if classes is None or classes == found.classes:
            return found
        return load(data, split, kind=Texts, root=root, classes=classes, **given)
    return table_texts(
        found,
        text=chosen.text or "",
        pair=chosen.pair,
        label=chosen.label,
        classes=classes,
        source=data,
    )


def load_batches(
    name: str,
    model: PreTrainedModel,
    data: str,
    *,
    split: str = "test",
    root: str | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    max_samples: int | None = None,
    columns: Columns | None = None,
    task: str | None = None,
) -> Batches:
    """Batches of data, by name or path, as inputs of the model called `name` (a folder, a run, a
    Hub name).

    Images become floats of the model's size and channels, normalized according to its
    preprocessor_config.json. Texts are tokenized; one long text becomes blocks of `max_length`
    tokens.
    """
    from everydepth.data import Images, Points, Texts, batches, trim_padding
    from everydepth.exits.load import model_folder

    name = model_folder(name)
    found = load_data(data, split, root=root, columns=columns)
    if isinstance(found, Images):
        return batches(found.first(max_samples), batch_size, transform=_image_input(name, model))
    if isinstance(found, Points):
        return batches(found.first(max_samples), batch_size)
    rows = _tokens(name, model, found, max_length, max_samples, task)
    return batches(rows, batch_size, transform=trim_padding if isinstance(found, Texts) else None)


def _tokens(
    name: str,
    model: PreTrainedModel,
    found: Texts | Corpus,
    max_length: int,
    max_samples: int | None,
    task: str | None,
) -> Rows:
    from everydepth.data import Texts, token_blocks, tokenized
    from everydepth.exits.load import load_tokenizer
    from everydepth.stream import as_stream

    tokenizer: Any = load_tokenizer(name)
    longest = getattr(model.config, "max_position_embeddings", None) or max_length
    length = min(max_length, longest)
    if isinstance(found, Texts):
        labels = "tokens" if (task or as_stream(model).task) == "causal_lm" else None
        return tokenized(found.first(max_samples), tokenizer, length, labels=labels)
    # Tokens have a few characters: no need to encode a whole corpus for its first blocks.
    text = found.text if max_samples is None else found.text[: max_samples * length * 8]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_blocks(ids, length).first(max_samples)


def _image_input(name: str, model: PreTrainedModel) -> Transform:
    """A transform from bytes to floats with the model's size, channels, mean and std."""
    from everydepth.data.pictures import Lens, floats

    settings = preprocessing_of(name)

    def change(batch: Batch, generator: torch.Generator) -> Batch:
        pixels = floats(batch["pixel_values"])
        lens = Lens.of(model.config, settings, like=pixels)
        return batch | {"pixel_values": lens.normalized(lens.resized(pixels))}

    return change


def preprocessing_of(name: str) -> dict[str, Any]:
    """The preprocessor_config.json of a model; empty if it has none."""
    file = preprocessor_file(name)
    return {} if file is None else json.loads(file.read_text(encoding="utf-8"))


def preprocessor_file(name: str) -> Path | None:
    """The path of a model's preprocessor_config.json, local or from the Hub, or None."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        name,
        "preprocessor_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
