"""Write a Hugging Face language model as a GGUF file, and compare the two in llama.cpp.

Names of tensors come from the package gguf, by those in transformers.
"""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.engines import llama_cpp
from everydepth.engines.gguf_tokens import CONVERT, SAMPLES, add_tokens
from everydepth.engines.llama_cpp import Step
from everydepth.errors import ExportError, UnsupportedModelError
from everydepth.stream import ResidualStream, unwrapped

# GGUF's name of each model type. Others need tensors transposed, shifted or merged, or more keys.
_NAMES = {
    "arcee": "arcee",
    "ernie4_5": "ernie4_5",
    "llama": "llama",
    "mistral": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
# Architectures whose rotary pairs are neighbors in llama.cpp, but not in transformers.
_INTERLEAVED = ("arcee", "llama", "smollm3")
# The GGUF key of each config attribute. llama.cpp ignores keys that an architecture does not use.
_SETTINGS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
}
# Settings that are floats in GGUF, even if a config has an integer such as 10000.
_FRACTIONS = ("freq_base", "epsilon")

# Largest difference of a log-probability: llama.cpp rounds activations to the type of the matrix.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 5e-1}
# Quantized types, for which llama.cpp rounds activations to eight bits.
_NARROW = {"int8": "Q8_0", "int4": "Q4_0"}
_TOLERANCE_NARROW = 1.0  # 0.2 to 0.6 in stories15M and SmolLM2-135M


@torch.no_grad()
def write_gguf(
    stream: ResidualStream, tokenizer: Any, path: Path, weights: str = "float32"
) -> nn.Module:
    """Write a model in its own precision, or with quantized matrices ("int8", "int4").

    Returns the model with the weights of the file, in float32, which llama.cpp was compared with.

    tokenizer: the model's fast tokenizer; llama.cpp must tokenize texts identically.
    """
    llama_cpp.check_installed()
    model = unwrapped(stream.model)
    dtype = next(model.parameters()).dtype
    if dtype not in _TOLERANCE:
        raise UnsupportedModelError(
            f"{stream.name} has weights of {dtype}; use model.float(), .half() or .bfloat16()"
        )
    gguf: Any = import_module("gguf")
    name = _NARROW.get(weights)
    narrow = None if name is None else gguf.GGMLQuantizationType[name]
    _write(stream, model, tokenizer, path, gguf, narrow)
    # Not model.float(), which transformers refuses for models loaded from a GGUF file.
    exact = nn.Module.float(copy.deepcopy(model))
    for parameter in exact.parameters() if narrow is not None else ():
        if _is_narrowed(parameter):
            found = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), narrow), narrow)
            parameter.data = torch.from_numpy(found)
    most = _TOLERANCE[dtype] if narrow is None else _TOLERANCE_NARROW
    _compare(stream, exact, tokenizer, path, most)
    return exact


def _is_narrowed(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[1] % 32 == 0  # which share a scale


def _write(
    stream: ResidualStream, model: nn.Module, tokenizer: Any, path: Path, gguf: Any, narrow: Any
) -> None:
    config: Any = model.config
    name, kind, permuted = _architecture(stream, config, gguf)
    names = gguf.get_tensor_name_map(kind, stream.depth)
    writer = gguf.GGUFWriter(path, name)
    writer.add_type("model")
    for key, value in _settings(stream, config).items():
        if isinstance(value, float):
            writer.add_float32(f"{name}.{key}", value)
        else:
            writer.add_uint32(f"{name}.{key}", value)
    embedding: nn.Module = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    rows: Tensor = embedding.weight  # pyright: ignore[reportAssignmentType]
    add_tokens(writer, tokenizer, rows.shape[0])
    for own, tensor in _tensors(model, rows).items():
        found = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnsupportedModelError(
                f"{stream.name} has {own}, which has no name in a GGUF {name} model; {CONVERT}"
            )
        heads = _heads(found, config) if permuted else None
        placed = tensor if heads is None else _interleaved(tensor, heads)
        _add(writer, gguf, found, placed, narrow)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(stream: ResidualStream, config: Any, gguf: Any) -> tuple[str, Any, bool]:
    """GGUF's name and number of the architecture, and whether rotary pairs are interleaved."""
    own = str(getattr(config, "model_type", type(config).__name__))
    if own not in _NAMES:
        raise UnsupportedModelError(
            f"{stream.name} is a {own} model, which cannot be written as GGUF, unlike "
            f"{', '.join(sorted(_NAMES))}; {CONVERT}"
        )
    name = _NAMES[own]
    (kind,) = (number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    return name, kind, name in _INTERLEAVED


def _settings(stream: ResidualStream, config: Any) -> dict[str, int | float]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedModelError(
            f"{stream.name} uses {kind!r} position scaling, which is not supported here; {CONVERT}"
        )
    most = int(config.max_position_embeddings)
    windows = [stream.window(depth) for depth in range(1, stream.depth + 1)]
    if any(window is not None and window < most for window in windows):
        raise UnsupportedModelError(
            f"{stream.name} uses sliding windows of {min(w for w in windows if w)} tokens, which "
            f"are not supported here; {CONVERT}"
        )
    own: dict[str, Any] = {**vars(config), **rope}
    found = {key: own[name] for name, key in _SETTINGS.items() if own.get(name) is not None}
    found = {k: float(v) if k.endswith(_FRACTIONS) else v for k, v in found.items()}
    width = own.get("head_dim") or config.hidden_size // config.num_attention_heads
    turned = int(width * own.get("partial_rotary_factor", 1.0))
    found |= {"rope.dimension_count": turned}
    return found | {"attention.key_length": width, "attention.value_length": width}


def _tensors(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """All parameters by name, without a head equal to the embedding: llama.cpp then uses the
    embedding. The tensors decide, not the config."""
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    found = dict(model.state_dict())
    if head is not None and torch.equal(head.weight, rows):
        for own, parameter in model.named_parameters(remove_duplicate=False):
            if parameter is head.weight and own.startswith("lm_head"):
                found.pop(own, None)
    return found


def _heads(name: str, config: Any) -> int | None:
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    if ".attn_k." in name:
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return None


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rotary pairs interleaved; transformers stores all first halves, then all second ones."""
    inner = (heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return tensor.reshape(inner).transpose(1, 2).reshape(tensor.shape)


def _add(writer: Any, gguf: Any, name: str, tensor: Tensor, narrow: Any) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.ndim == 1:  # norms and biases, which llama.cpp uses in float32
        tensor = tensor.float()
    if narrow is not None and _is_narrowed(tensor):
        writer.add_tensor(name, gguf.quantize(tensor.float().numpy(), narrow), raw_dtype=narrow)
    elif tensor.dtype == torch.bfloat16:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor.numpy())


def _compare(
    stream: ResidualStream, exact: nn.Module, tokenizer: Any, path: Path, most: float
) -> None:
    """Compare tokens and predictions of texts in llama.cpp and in the model."""
    texts = [list(map(int, tokenizer(text).input_ids)) for text in SAMPLES]
    room = (stream.positions or 64) - 9
    prompts = [ids[: min(24, room)] for ids in texts]
    try:
        tokenized = llama_cpp.tokenized(path, SAMPLES)
        (found,) = llama_cpp.continued([path], prompts)
    except ExportError as error:
        raise ExportError(f"{error}; nothing was written") from error
    for text, mine, theirs in zip(SAMPLES, texts, tokenized, strict=True):
        if mine != theirs:
            raise ExportError(
                f"llama.cpp tokenizes {text!r} as {theirs}, but the tokenizer as {mine}; nothing "
                "was written. Give the model's own tokenizer"
            )
    gap = 0.0
    for prompt, steps in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *(step.token for step in steps)]])
        logits = exact(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        for row, step in zip(logits.float().log_softmax(-1), steps, strict=True):
            gap = max(gap, _gap(row, step))
    if not gap <= most:
        raise ExportError(
            f"log-probabilities of llama.cpp differ by {gap:.1e} from those of {stream.name}, more "
            f"than {most:.0e}; nothing was written; {CONVERT}"
        )


def _gap(row: Tensor, step: Step) -> float:
    """The largest difference; also counts a token chosen although another is more probable."""
    listed = torch.tensor(list(step.top.values()))
    gap = (row[list(step.top)] - listed).abs().max()
    return float(max(gap, row.max() - row[step.token]))
