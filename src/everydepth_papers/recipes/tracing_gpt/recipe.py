"""Language models by standard and aligned training: Figure 9 (AlignedGPT)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import (
    Cell,
    Finished,
    Preset,
    Recipe,
    Row,
    data_folder,
    over_seeds,
    published,
)
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.rows import holds_in, numbers, paired, where
from everydepth_papers.evidence.texts import KNOWS_WORDS, frequency_perplexity, pretrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = published(__file__)
MEASURES = ("accuracy", "perplexity", "coherence", "diversity")
SENTENCES = (
    "the cat sat on the mat . the dog ran to the old house . a red boat sailed by the sea . "
    "we read a long book about the stars . rain fell on the green hills all day . "
)
SIMCSE = "princeton-nlp/sup-simcse-bert-base-uncased"


def scratch(settings: Cell) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=settings["vocabulary"],
            n_positions=settings["length"] * 2,
            n_embd=settings["width"],
            n_layer=settings["depth"],
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def texts(settings: Cell) -> tuple[str, str]:
    """Training and test text."""
    from everydepth.data import Corpus, Texts, load

    name = settings["data"]
    if name == "synthetic":
        return SENTENCES * 50, SENTENCES * 10
    if "/" in name:
        parts = [
            load(name, kind=Texts, split=split, task=settings["task"], text="text")
            for split in ("train", "test")
        ]
        return tuple("".join(part.texts) for part in parts)  # pyright: ignore[reportReturnType]
    train, test = (load(name, kind=Corpus, split=split).text for split in ("train", "test"))
    return train[: settings["characters"]], test[: settings["characters"] // 4]


def model_and_tokenizer(settings: Cell, train: str) -> tuple[Any, Any]:
    name = settings["model"]
    if name == "scratch":
        from everydepth.data.byte_tokens import byte_tokenizer

        return scratch(settings), byte_tokenizer(train.splitlines(), settings["vocabulary"])
    return pretrained(name)


def encoder(settings: Cell, train: str) -> Callable[[Sequence[str]], np.ndarray]:
    """SimCSE where it can be downloaded; else the `encoder` of the settings, a folder; else latent
    semantics of the training text's lines."""
    if "/" in settings["data"]:
        from tempfile import TemporaryDirectory

        from transformers import AutoModel, AutoTokenizer

        from everydepth.tracing import sentence_encoder

        with TemporaryDirectory() as folder:  # of the old kind (.bin); we read safetensors only
            AutoModel.from_pretrained(SIMCSE).save_pretrained(folder)
            AutoTokenizer.from_pretrained(SIMCSE).save_pretrained(folder)
            return sentence_encoder(folder, pool="first")
    if "encoder" in settings:
        from everydepth.tracing import sentence_encoder

        return sentence_encoder(data_folder(settings["encoder"]))
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    weigh = TfidfVectorizer(max_features=3000, sublinear_tf=True)
    lines = weigh.fit_transform([line for line in train.split(" . ") if len(line) > 20])
    fold = TruncatedSVD(min(50, min(lines.shape) - 1), random_state=0).fit(lines)
    return lambda given: fold.transform(weigh.transform(list(given)))


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    import torch

    import everydepth as ed
    from everydepth.data import token_blocks

    torch.manual_seed(seed)
    train, test = texts(settings)
    model, tokenizer = model_and_tokenizer(settings, train)
    length = settings["length"]
    learn, look = (
        token_blocks(tokenizer.encode(text, add_special_tokens=False), length)
        for text in (train, test)
    )
    long = settings["steps"] > 5000
    ed.fit(
        ed.EveryDepth(
            model, ed.aligned() if settings["objective"] == "aligned" else ed.end_to_end()
        ),
        learn,
        steps=settings["steps"],
        batch_size=settings["batch"],
        lr=settings["lr"],
        warmup=0.05,
        clip=1.0,
        seed=seed,
        run=folder / "training" if long else None,
        resume=long,
        progress=False,
    )
    seen = ed.trace(
        model,
        look,
        ("next_token_accuracy", "perplexity"),
        batch_size=16,
        max_samples=settings["look"],
        progress=False,
    )
    starts = [look.input_ids[i, : length // 2].tolist() for i in range(settings["prompts"])]
    written = ed.text_at_depth(
        model,
        tokenizer,
        [tokenizer.decode(start) for start in starts],
        new_tokens=settings["new"],
        seed=seed,
        encoder=encoder(settings, train),
    )
    return {
        "accuracy": numbers(seen["next_token_accuracy"][1:]),
        "perplexity": numbers(seen["perplexity"][1:]),
        "frequencies": frequency_perplexity(learn, look),
        "coherence": numbers(written.arrays["coherence"]),
        "diversity": numbers(written.arrays["diversity"]),
        "text": [line[0] for line in written.arrays["text"].tolist()],
        "prompt": str(written.arrays["prompts"][0]),
    }


def below(result: Finished, name: str) -> float:
    """The mean over layers 1 to L-1; of perplexity the geometric one."""
    values = np.array(result[name][:-1], float)
    return float(np.exp(np.log(values).mean()) if name == "perplexity" else values.mean())


def rows(results: Sequence[Finished]) -> list[Row]:
    found: list[Row] = []
    for model in dict.fromkeys(r.cell["model"] for r in results):
        of = {name: where(results, model=model, objective=name) for name in ("standard", "aligned")}
        both = paired(of["aligned"], of["standard"])
        for measure in MEASURES:
            for name, group in of.items():
                found.append(
                    over_seeds(
                        f"{model}: {measure} below the last layer, {name}",
                        None,
                        [below(r, measure) for r in group],
                        "mean over layers 1 to L-1",
                    )
                )
                found.append(
                    over_seeds(
                        f"{model}: {measure} of the last layer, {name}",
                        None,
                        [r[measure][-1] for r in group],
                    )
                )
            sign = -1 if measure == "perplexity" else 1
            # Figure 21 shows the texts of which these two are measured.
            item = "Fig. 9, 21" if measure in ("coherence", "diversity") else "Fig. 9"
            found.append(
                holds_in(
                    f"{item}, {model}: aligned training has better {measure} below the last layer",
                    PUBLISHED[measure],
                    both,
                    lambda a, s, m=measure, sign=sign: sign * (below(a, m) - below(s, m)) > 0,
                    "mean over layers 1 to L-1",
                    premises=[KNOWS_WORDS],
                )
            )
        found.append(
            holds_in(
                f"Fig. 9, {model}: aligned training keeps the last layer's perplexity",
                "not stated",
                both,
                lambda a, s: a["perplexity"][-1] <= 1.01 * s["perplexity"][-1],
                "at most 1 % higher",
                premises=[KNOWS_WORDS],
            )
        )
    return found


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(r.cell["model"] for r in results))
    page = Figure(figsize=(13, 3 * len(models)), layout="constrained")
    panels = page.subplots(len(models), 4, squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for axis, measure in zip(line, MEASURES, strict=True):
            for name in ("standard", "aligned"):
                group = where(results, model=model, objective=name)
                values = [r[measure] for r in group]
                band(axis, range(1, len(values[0]) + 1), values, name)
            axis.set(title=f"{measure}, {model}", xlabel="depth (blocks)")
            if measure == "perplexity":
                axis.set_yscale("log")
        line[0].legend()
    return page


SMALL: Cell = {
    "data": "wikitext-2", "characters": 1_500_000, "model": "scratch", "vocabulary": 1000,
    "width": 64, "depth": 6, "length": 64, "batch": 16, "steps": 150, "lr": 2e-3, "look": 64,
    "prompts": 6, "new": 24,
}  # fmt: skip
TUNED: Cell = {**SMALL, "model": "stories260K", "lr": 1e-3}
# Fixed before it was run.
FULL: Cell = {
    **SMALL, "model": "stories15M", "encoder": "minilm", "length": 128, "steps": 1000,
    "lr": 3e-4, "look": 200, "prompts": 100, "new": 64,
}  # fmt: skip
SMOKE: Cell = {
    **SMALL, "data": "synthetic", "vocabulary": 280, "width": 16, "depth": 2, "length": 16,
    "steps": 4, "look": 4, "prompts": 1, "new": 6,
}  # fmt: skip
PAPER: Cell = {
    **SMALL, "data": "Salesforce/wikitext", "task": "wikitext-103-raw-v1",
    "model": "openai-community/gpt2", "length": 256, "batch": 8, "steps": 40_000, "lr": 2e-5,
    "look": 1000, "prompts": 200, "new": 128,
}  # fmt: skip


def cells(*settings: Cell) -> list[Cell]:
    names = ("standard", "aligned")
    return [{**cell, "objective": name} for cell in settings for name in names]


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


RECIPE = Recipe(
    name="tracing_gpt",
    title="AlignedGPT: accuracy, perplexity, coherence and diversity per layer",
    paper="tracing",
    item="Figure 9",
    presets={
        "smoke": Preset(cells=cells(SMOKE), cost="2 s"),
        "small": Preset(
            cells=cells(SMALL, TUNED),
            seeds=3,
            cost="2 min, 1 core",
            needs=("wikitext-2", "stories260K"),
        ),
        "full": Preset(
            cells=cells(FULL),
            seeds=3,
            cost="about 6 h, 1 core",
            needs=("wikitext-2", "stories15M", "minilm"),
            memory_gib=4.0,
        ),
        "paper": Preset(
            cells=cells(PAPER),
            cost="70 h per run on a 24 GB GPU, according to the paper",
            needs=("Salesforce/wikitext",),
            models={"openai-community/gpt2": gpt2},
            memory_gib=20.0,
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Small: a GPT-2 of 6 layers and width 64 from scratch and the pretrained stories260K (5 "
        "layers), each 150 steps on WikiText-2. Coherence is the cosine of prompt and continuation "
        "in the latent semantics (TF-IDF, 50 dimensions) of the training text; the full preset "
        "uses all-MiniLM-L6-v2 and 100 prompts, the paper preset SimCSE as the paper does."
    ),
)
