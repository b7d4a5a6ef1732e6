"""Opening a model: from a folder, a run directory or the Hugging Face hub, whole or to a depth."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn.modules.module import register_module_parameter_registration_hook

from everydepth.config import checked
from everydepth.errors import DataError, EveryDepthError, UnsupportedModelError
from everydepth.exits.lazy import lazy_tensors
from everydepth.exits.untrusted import check_config, check_inside, read_json
from everydepth.files import explained
from everydepth.progress import quiet_transformers
from everydepth.stream import as_stream, at_depth, model_class
from everydepth.stream.balcony import has_balconies, with_balconies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The tasks whose models are opened from a folder that nobody vouches for.
_TASKS = (
    *("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION"),
    *("TOKEN_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SPARE = 1000  # parameters that a model may have and its folder lack, before it is refused unmade
_INDEX = "model.safetensors.index.json"
# What classes raise on settings or sizes that make no sense.
_UNFIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@checked
@explained("the model cannot be read", DataError)
def load(
    source: str | Path, *, depth: int | None = None, trusted: bool = True, **options: Any
) -> PreTrainedModel:
    """A plain model, in eval mode, whole or with its first `depth` blocks.

    Its class is the one its own config names. Only safetensors weights are read, and no code that
    comes with the model is run. Only the tensors of the wanted blocks, the embedding and the
    readout are read, so time and memory grow with `depth`. A model saved with balconies comes back
    with them. The exceptions are a depth whose readout
    is computed from later blocks (one before the last change of shape), and a class whose blocks
    shapes alone do not tell: there the whole checkpoint is read first.

    source: a folder written by `save_pretrained` or `export`, a run directory, or a name on the
        Hugging Face hub.
    trusted: False for a folder that anybody could have written: links and settings that lead out
        of it are refused, and so are classes that neither everydepth nor a task of transformers'
        auto classes names.
    options: passed to `as_stream` if a depth is given.

    >>> model.save_pretrained("full")
    >>> small = ed.load("full", depth=1)
    >>> type(small).__name__, small.config.num_hidden_layers
    ('ViTForImageClassification', 1)
    """
    folder = _folder(source, trusted)
    try:
        if not (trusted and has_balconies(folder)):
            return _opened(folder, depth, trusted, options)
        found = with_balconies(_opened(folder, None, trusted, options), folder)
        # It has what everybody asks of a model that was loaded: a config, and a stream.
        return cast("PreTrainedModel", found if depth is None else at_depth(found, depth))
    except EveryDepthError:
        raise
    except _UNFIT as error:
        raise DataError(
            f"the model in {folder} cannot be opened ({type(error).__name__}: {error}); give a "
            "folder written by save_pretrained"
        ) from error
    except RuntimeError as error:  # sizes that do not fit together, or do not fit into the memory
        raise DataError(f"the model in {folder} cannot be built ({error})") from error


def load_tokenizer(source: str | Path, *, trusted: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    trusted: False reads its tokenizer.json alone: the other files of a tokenizer may name a class
        or a path, this one is data only.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = model_folder(source)
    if trusted:
        try:
            # Left out, it would ask at the terminal whether to run code that comes with it.
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder!r} has no tokenizer ({str(error).splitlines()[0]}); save one beside the "
                "model with tokenizer.save_pretrained"
            ) from error
    file = check_inside(Path(folder), Path(source)) / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; save a fast tokenizer beside the model with "
            "tokenizer.save_pretrained"
        )
    read_json(file)  # an error of our own, if it is not even JSON
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the parser raises nothing more special
        raise DataError(
            f"{file} is not a tokenizer ({error}); save the tokenizer again with save_pretrained"
        ) from error


def model_folder(source: str | Path) -> str:
    """Where the model of a run directory is; any other folder or name as it is."""
    inner = Path(source) / "model"
    return str(inner) if (inner / "config.json").is_file() else str(source)


def _folder(source: str | Path, trusted: bool) -> Path:
    """The folder of the model, fetched from the hub (or its cache) if it is not here."""
    folder = Path(model_folder(source))
    if not trusted:
        check_inside(folder, Path(source))
    if folder.is_dir() or not trusted:
        return folder
    from transformers.utils.hub import cached_file

    def fetched(name: str) -> str | None:
        return cached_file(str(source), name, _raise_exceptions_for_missing_entries=False)

    try:
        config = fetched("config.json")
    except (OSError, ValueError):
        config = None
    if config is None:
        raise DataError(
            f"{str(source)!r} is neither a folder here nor a model found on the Hugging Face hub; "
            "give the folder of a model, or check the name and the network"
        )
    index, shards = fetched(_INDEX), ["model.safetensors"]
    if index is not None:
        shards = sorted(set(read_json(Path(index))["weight_map"].values()))
    if None in [fetched(name) for name in shards]:
        raise DataError(
            f"{str(source)!r} on the Hugging Face hub has no model.safetensors; other weights can "
            "hold code, so load them yourself and save the model again with save_pretrained"
        )
    fetched("generation_config.json")
    return Path(config).parent


def _opened(
    folder: Path, depth: int | None, trusted: bool, options: dict[str, Any]
) -> PreTrainedModel:
    cls, config = _described(folder, trusted)
    if depth is None:
        return _read(cls, folder, config, whole=True)
    with torch.device("meta"), quiet_transformers(), _no_larger_than(lazy_tensors(folder), folder):
        whole = cls(config)
    try:
        stream = as_stream(whole, **options)
    except UnsupportedModelError:  # what is read off a forward pass needs more than shapes
        return _cut(_read(cls, folder, config), depth, options)
    small: Any = stream.truncated(stream.check_depth(depth, lowest=1), share=True)
    known = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    if any(known.get(name) != tensor.shape for name, tensor in small.state_dict().items()):
        return _cut(_read(cls, folder, config), depth, options)
    return _read(cls, folder, small.config)


def _cut(full: PreTrainedModel, depth: int, options: dict[str, Any]) -> PreTrainedModel:
    stream = as_stream(full, **options)
    small = stream.truncated(stream.check_depth(depth, lowest=1), share=True)
    return cast("PreTrainedModel", small)


def _described(folder: Path, trusted: bool) -> tuple[type[PreTrainedModel], Any]:
    """The class and the config of the model in a folder."""
    file = folder / "config.json"
    try:
        read_json(file)
    except DataError as error:
        held = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else []
        raise DataError(
            f"{folder} has no readable config.json ({error}) but {', '.join(held) or 'nothing'}; "
            "give a directory written by save_pretrained or everydepth.export(format='hf')"
        ) from error
    config = check_config(file, trusted=trusted)
    names = config.get("architectures") if isinstance(config, dict) else config
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise DataError(
            f"{file} has {names!r} as its architectures, so the class is unknown; save the model "
            'again with save_pretrained, or write "architectures": ["ClassName"]'
        )
    cls = _class(names[0], trusted)
    return cls, cls.config_class.from_pretrained(folder)  # pyright: ignore[reportOptionalMemberAccess]


def _class(name: str, trusted: bool) -> type[PreTrainedModel]:
    try:
        return cast("type[PreTrainedModel]", model_class(name))
    except UnsupportedModelError:
        import transformers

        found = getattr(transformers, name, None) if trusted or name in _listed() else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
        raise


def _listed() -> set[str]:
    """The classes that transformers lists for a task in which something is predicted."""
    from transformers.models.auto import modeling_auto

    tables = (vars(modeling_auto)[f"MODEL_FOR_{task}_MAPPING_NAMES"] for task in _TASKS)
    held = (names for table in tables for names in table.values())
    return {name for names in held for name in ((names,) if isinstance(names, str) else names)}


@contextmanager
def _no_larger_than(tensors: Sized, folder: Path) -> Generator[None, None, None]:
    """End the making of a model once it has many more parameters than the folder has tensors.

    A config may ask for a billion layers, which even without memory for weights take hours.
    """
    most, made, here = _SPARE + 4 * len(tensors), 0, threading.get_ident()

    def count(*_: Any) -> None:
        nonlocal made
        made += threading.get_ident() == here
        if made > most:
            raise DataError(
                f"{folder} holds {len(tensors)} tensors, but its config.json asks for more than "
                f"{most} parameters; save the model again with save_pretrained"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _read(
    cls: type[PreTrainedModel], folder: Path, config: Any, *, whole: bool = False
) -> PreTrainedModel:
    """Read what a model of this config needs; all other tensors stay on the disk.

    whole: an error if blocks are left over.
    """
    from transformers import GenerationConfig

    tensors: Any = lazy_tensors(folder)
    # It would list every tensor of the blocks that are left out.
    with (
        quiet_transformers(),
        _no_larger_than(tensors, folder),
        torch.random.fork_rng(devices=[]),  # what is missing would be drawn
    ):
        loaded: Any = cls.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    model, info = loaded
    missing = sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]}))
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} tensors of {cls.__name__} ({', '.join(missing[:3])}, "
            "...) or has them in another shape; it was saved from another class"
        )
    blocks = {_NUMBER.sub("#", name) for name, _ in model.named_parameters()}
    more = [name for name in info["unexpected_keys"] if _NUMBER.sub("#", name) in blocks]
    if whole and more:
        raise DataError(
            f"{folder} holds {len(more)} tensors beyond those of its config.json "
            f"({', '.join(sorted(more)[:3])}, ...): more blocks than the config has; correct the "
            "config, or save the model again with save_pretrained"
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()
