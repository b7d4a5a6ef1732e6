"""The data named on a command line, in the form a model expects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from everydepth.cli.loading import preprocessing_of
from everydepth.config import Config, plain, setting
from everydepth.errors import DataError, SettingError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from everydepth.data import Batch, Batches, Corpus, Images, Points, Table, Texts, Tokens
    from everydepth.data.batches import Transform


@dataclass(frozen=True, kw_only=True)
class Source(Config):
    """The data, and how much of it to use."""

    title: ClassVar[str] = "Data"

    data: str = setting(
        flags=("--data", "-d"), help="A name (digits, fashion-mnist, ...), a file or a folder."
    )
    data_root: str | None = setting(None, help="The folder with named datasets.")
    max_samples: int | None = setting(None, least=1, help="Use only the first N rows.")
    max_length: int = setting(128, least=1, help="Truncate texts to N tokens.")
    text: str | None = setting(None, help="The column of a table (CSV, JSON, ...) with the text.")
    pair: str | None = setting(None, help="The column with the second of two texts.")
    label: str | None = setting(None, help="The column with the class.")
    task: str | None = setting(
        None, help="embedding: measure the vectors of an encoder that has no head."
    )

    def asked(self) -> dict[str, Any]:
        """The settings that affect the outcome, as JSON values; the data's location does not."""
        optional = ("text", "pair", "label", "task")
        unset = [name for name in optional if getattr(self, name) is None]
        return {k: v for k, v in plain(self).items() if k not in ("data_root", *unset)}

    @property
    def one_file(self) -> bool:
        """Whether the data is a single file, which has no splits."""
        return Path(self.data).is_file()

    def check_part(self, option: str, split: str) -> None:
        """Raise an error if the held-out rows would be the training rows."""
        if self.one_file:
            raise SettingError(
                f"{option} {split}, but {self.data} is a single file, used entirely for training; "
                f"give a folder with one file per split ({split}{Path(self.data).suffix})"
            )

    def read(self, split: str) -> Images | Texts | Corpus | Points:
        """A split of the data, not yet prepared for a model; a table gives the texts in its
        columns."""
        from everydepth.data import Table, Texts, load
        from everydepth.data.catalog import has_columns
        from everydepth.data.tables import table_texts

        columns = {"text": self.text, "pair": self.pair, "label": self.label}
        given = {name: column for name, column in columns.items() if column is not None}
        own = has_columns(self.data)
        read = partial(load, self.data, split, root=self.data_root, **(given if own else {}))
        found = read()
        if isinstance(found, Table):
            columns = self._columns_of(found)
            labeled = columns["label"] is not None
        elif given and not own:
            raise SettingError(
                f"{self.data!r} is not a table; leave out --text, --pair and --label"
            )
        elif own and isinstance(found, Texts):
            labeled = found.labels is not None
        else:
            return found
        classes = None
        if labeled and split != "train" and not self.one_file:
            # A split may lack a class, so all splits use the class numbers of the training split.
            train = self.read("train")
            classes = train.classes if isinstance(train, Texts) else None
        if isinstance(found, Table):
            text = columns.pop("text") or ""
            return table_texts(found, text=text, **columns, classes=classes, source=self.data)
        if classes is None or classes == found.classes:
            return found
        return read(kind=Texts, classes=classes)

    def _columns_of(self, table: Table) -> dict[str, str | None]:
        """The columns with the text, a second text, and the class.

        By default the class is the column label or labels, and the text the column text, or the
        only one or two other columns.
        """
        if self.text is not None:
            return {"text": self.text, "pair": self.pair, "label": self.label}
        label = self.label or next((n for n in ("label", "labels") if n in table.columns), None)
        words = [name for name in table.columns if name != label]
        if "text" in words:
            return {"text": "text", "pair": self.pair, "label": label}
        if len(words) == 1 or (label is not None and len(words) == 2):
            return {"text": words[0], "pair": self.pair or (*words, None)[1], "label": label}
        raise DataError(
            f"{self.data!r} is a table with the columns {', '.join(table.columns)}; give the one "
            "with the text as --text, and the one with the class as --label"
        )

    def stream(self, model: Any) -> Any:
        """The model, or its stream where the command line says what it predicts."""
        from everydepth.stream import as_stream

        return model if self.task is None else as_stream(model, task=cast(Any, self.task))

    def batches(self, name: str, model: PreTrainedModel, *, split: str, batch_size: int) -> Batches:
        """Batches of a split, as inputs of the model called `name` (a folder, a run, a Hub name).

        Images become floats of the model's size and channels, normalized according to its
        preprocessor_config.json. Texts are tokenized; one long text becomes blocks of `max_length`
        tokens, a shorter one a single block.
        """
        from everydepth.data import Images, Points, Texts, batches, trim_padding
        from everydepth.exits.load import model_folder

        name, most = model_folder(name), self.max_samples
        found = self.read(split)
        if isinstance(found, Images):
            return batches(found.first(most), batch_size, transform=_image_input(name, model))
        if isinstance(found, Points):
            return batches(found.first(most), batch_size)
        trim = trim_padding if isinstance(found, Texts) else None
        return batches(self._tokens(name, model, found), batch_size, transform=trim)

    def _tokens(self, name: str, model: PreTrainedModel, found: Texts | Corpus) -> Tokens:
        from everydepth.data import Texts, token_blocks, tokenized
        from everydepth.exits.load import load_tokenizer
        from everydepth.stream import as_stream

        tokenizer: Any = load_tokenizer(name)
        longest = getattr(model.config, "max_position_embeddings", None) or self.max_length
        length, most = min(self.max_length, longest), self.max_samples
        if isinstance(found, Texts):
            labels = "tokens" if (self.task or as_stream(model).task) == "causal_lm" else None
            return tokenized(found.first(most), tokenizer, length, labels=labels)
        # Tokens have a few characters: no need to encode a whole corpus for its first blocks.
        text = found.text if most is None else found.text[: most * length * 8]
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return token_blocks(ids, min(length, max(1, len(ids)))).first(most)


@dataclass(frozen=True, kw_only=True)
class Rows(Source):
    """One split of the data, in batches."""

    split: str = setting("test", help="The split of the data.")
    batch_size: int = setting(32, least=1, help="Rows per batch.")

    def load(self, name: str, model: PreTrainedModel) -> Batches:
        """Batches as inputs of the model called `name`."""
        return self.batches(name, model, split=self.split, batch_size=self.batch_size)


def _image_input(name: str, model: PreTrainedModel) -> Transform:
    """A transform from bytes to floats with the model's size, channels, mean and std."""
    from everydepth.data.pictures import Lens, floats

    settings = preprocessing_of(name)

    def change(batch: Batch, generator: torch.Generator) -> Batch:
        pixels = floats(batch["pixel_values"])
        lens = Lens.of(model.config, settings, like=pixels)
        return batch | {"pixel_values": lens.normalized(lens.resized(pixels))}

    return change
