"""Load a model, or its first blocks, from a folder, a run directory or the Hugging Face Hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from everydepth.config import checked
from everydepth.errors import (
    FOREIGN,
    DataError,
    EveryDepthError,
    SettingError,
    UnsupportedModelError,
)
from everydepth.exits.lazy import lazy_tensors
from everydepth.exits.untrusted import check_config, check_inside, read_json
from everydepth.files import explained
from everydepth.progress import quiet_transformers
from everydepth.runs.run import ENVIRONMENT
from everydepth.stream import as_stream, at_depth, model_class
from everydepth.stream.balcony import has_balconies, with_balconies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tasks whose models may be loaded from an untrusted folder.
_TASKS = (
    *("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION"),
    *("TOKEN_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SPARE = 1000  # parameters a model may have beyond those in its folder
_INDEX = "model.safetensors.index.json"


@checked
@explained("the model cannot be read", DataError)
def load(
    source: str | Path, *, depth: int | None = None, trusted: bool = True, **options: Any
) -> PreTrainedModel:
    """Load a plain model in eval mode, or its first `depth` blocks.

    The class is the one named in the model's config. Only safetensors weights are read, and no code
    that comes with the model is run. Only the tensors of the requested blocks, the embedding and
    the readout are read, so time and memory grow with `depth`. There are two exceptions, for which
    the whole checkpoint is read first: a depth whose readout is computed from later blocks (one
    before the last change of shape), and a class whose blocks cannot be found from shapes alone. A
    model saved with balconies is loaded with them.

    source: a folder written by `save_pretrained` or `export`, a run directory, or a name on the
        Hugging Face Hub.
    trusted: False for a folder from an untrusted source. Links and settings that lead out of it are
        refused, and so are classes unknown to everydepth and to transformers' auto classes.
    options: passed to `as_stream` if a depth is given.

    >>> model.save_pretrained("full")
    >>> small = ed.load("full", depth=1)
    >>> type(small).__name__, small.config.num_hidden_layers
    ('ViTForImageClassification', 1)
    """
    if options and depth is None:
        raise SettingError(
            f"{', '.join(options)} was given without a depth; options are for as_stream, which "
            "finds the blocks to keep: give depth=, or leave them out"
        )
    folder = _folder(source, trusted)
    try:
        if not (trusted and has_balconies(folder)):
            return _opened(folder, depth, trusted, options)
        found = with_balconies(_opened(folder, None, trusted, options), folder)
        # It has what callers expect of a loaded model: a config and a stream.
        return cast("PreTrainedModel", found if depth is None else at_depth(found, depth))
    except EveryDepthError:
        raise
    except RuntimeError as error:  # inconsistent sizes, or out of memory
        raise DataError(f"the model in {folder} cannot be built ({error})") from error
    except (ImportError, StrictDataclassError, *FOREIGN) as error:  # of a package for quantization
        raise DataError(
            f"the model in {folder} cannot be opened ({type(error).__name__}: {error}); give a "
            "folder written by save_pretrained"
        ) from error


def load_tokenizer(source: str | Path, *, trusted: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer saved with a model.

    trusted: False reads only tokenizer.json, which is pure data; other files of a tokenizer may
        name a class or a path.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = model_folder(source)
    if trusted:
        with _parsing(folder):
            try:
                # Else transformers would ask at the terminal whether to run the model's code.
                return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            except (OSError, ValueError) as error:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                raise DataError(
                    f"{folder!r} has no tokenizer ({first}); save one next to the "
                    "model with tokenizer.save_pretrained"
                ) from error
    file = check_inside(Path(folder), Path(source)) / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; save a fast tokenizer next to the model with "
            "tokenizer.save_pretrained"
        )
    read_json(file)  # raises our own error if it is not JSON
    with _parsing(file):
        return PreTrainedTokenizerFast(tokenizer_file=str(file))


@contextmanager
def _parsing(source: str | Path) -> Generator[None, None, None]:
    """Put into words what the parser of tokenizers raises, which is nothing specific."""
    try:
        yield
    except EveryDepthError:
        raise
    except BaseException as error:
        # What it panics at is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{source} is not a tokenizer ({error}); save the tokenizer again with save_pretrained"
        ) from error


def model_folder(source: str | Path) -> str:
    """The model's folder inside a run directory; any other folder or name is returned unchanged."""
    inner = Path(source) / "model"
    return str(inner) if (inner / "config.json").is_file() else str(source)


def _folder(source: str | Path, trusted: bool) -> Path:
    """The folder of a model, downloaded from the Hub (or found in its cache) if it is not local."""
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
            f"{str(source)!r} is neither a local folder nor found on the Hugging Face Hub; give "
            "the folder of a model, or check the name and the network"
        )
    index, shards = fetched(_INDEX), ["model.safetensors"]
    if index is not None:
        shards = sorted(set(read_json(Path(index))["weight_map"].values()))
    if None in [fetched(name) for name in shards]:
        raise DataError(
            f"{str(source)!r} on the Hugging Face Hub has no model.safetensors; other formats can "
            "contain code, so load it yourself and save it again with save_pretrained"
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
    except UnsupportedModelError:  # discovery needs a forward pass, and so the weights
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
            f"{folder} holds {', '.join(held) or 'nothing'} and no readable config.json ({error}); "
            "give a directory written by save_pretrained or everydepth.export(format='hf')"
        ) from error
    if (folder / ENVIRONMENT).is_file():
        raise DataError(
            f"{folder} is a run without a model; if it was interrupted, continue it with "
            "resume=True (--resume), or give the folder of a model"
        )
    config = check_config(file, trusted=trusted)
    names = config.get("architectures") if isinstance(config, dict) else config
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise DataError(
            f"{file} has the architectures {names!r}, but exactly one is needed; save the model "
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
    """The classes in transformers' auto mappings for `_TASKS`."""
    from transformers.models.auto import modeling_auto

    tables = (vars(modeling_auto)[f"MODEL_FOR_{task}_MAPPING_NAMES"] for task in _TASKS)
    held = (names for table in tables for names in table.values())
    return {name for names in held for name in ((names,) if isinstance(names, str) else names)}


@contextmanager
def _no_larger_than(tensors: Sized, folder: Path) -> Generator[None, None, None]:
    """Stop building a model that has many more parameters than the folder has tensors.

    A config may ask for a billion layers, which would take hours even on the meta device.
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


def _check_types(model: nn.Module, tensors: Mapping[str, Any], folder: Path) -> None:
    """Raise if a file's header calls the bits of weights by another type than they were saved in.

    As far as it can be told without checksums: what saves a model casts all of it to one type.
    """
    halves: set[torch.dtype] = set()
    for name, parameter in model.named_parameters():
        if name not in tensors:
            continue
        dtype = tensors[name].dtype
        if dtype in (torch.float16, torch.bfloat16):
            halves.add(dtype)
        if len(halves) > 1 or (parameter.is_floating_point() and not dtype.is_floating_point):
            raise DataError(
                f"{folder} holds {name} as {str(dtype)[6:]}, unlike the rest of the model; the "
                "file is damaged: restore it from a copy, or save the model again"
            )


def _is_beyond(name: str, model: nn.Module) -> bool:
    """Whether a tensor is named like one of a block after the last, also of a model without any."""
    modules = dict(model.named_modules())
    for found in _NUMBER.finditer(name):
        module = modules.get(name[: found.start() - 1])
        if isinstance(module, nn.ModuleList) and int(found.group()) >= len(module):
            return True
    return False


def _read(
    cls: type[PreTrainedModel], folder: Path, config: Any, *, whole: bool = False
) -> PreTrainedModel:
    """Load a model with this config; tensors it does not need are not read.

    whole: raise an error if the folder has more blocks.
    """
    from transformers import GenerationConfig

    tensors: Any = lazy_tensors(folder)
    with (
        quiet_transformers(),  # which would list every tensor of the blocks left out
        _no_larger_than(tensors, folder),
        torch.random.fork_rng(devices=[]),  # missing tensors would be initialized at random
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
            "...), or has them in another shape; it was saved from another class"
        )
    _check_types(model, tensors, folder)
    blocks = {_NUMBER.sub("#", name) for name, _ in model.named_parameters()}
    more = [
        name
        for name in info["unexpected_keys"]
        if _NUMBER.sub("#", name) in blocks or _is_beyond(name, model)
    ]
    if whole and more:
        raise DataError(
            f"{folder} has more blocks than its config.json: {len(more)} additional tensors "
            f"({', '.join(sorted(more)[:3])}, ...); correct the config, or save the model again "
            "with save_pretrained"
        )
    model.name_or_path = str(folder.resolve())  # PEFT writes it beside an adapter
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()
