"""Every class of transformers' auto mappings, tiny, from its own config; nothing is downloaded.

A config is shrunk by the names of its fields, not by the names of models: a class that
transformers adds later is built by the same rules.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROWS, TOKENS, LAYERS, WIDTH, HEADS, WORDS = 2, 8, 3, 32, 4, 99
IMAGE, CLASSES, SECONDS, LARGEST = 64, 3, 60, 20_000_000
_COUNTS = r"layers?$|^depths?$|num_blocks|vocab_size|max_position|_token_id$|experts"

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}

# Field names, most special first, and what they become.
_RULES: tuple[tuple[str, Any], ...] = (
    (r"(^|_)(pad|bos|eos|sep|cls|mask|unk|decoder_start|forced_bos|forced_eos)_token_id$", None),
    (r"sequence_length|max_source_positions|max_target_positions|n_positions|n_ctx", 64),
    (r"max_position_embeddings|max_positions|max_sequence_length|max_seq_len", 64),
    (r"^(encoder_|decoder_)?vocab_size", WORDS),
    (r"(num_)?experts_per_tok|num_experts_per_token|moe_topk|moe_k$|num_selected_experts", 2),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"n_group$|topk_group$|n_shared_experts|num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"^(num_hidden_layers|n_layers?|num_layers|num_blocks|depth)$", LAYERS),
    (r"^((num_)?(en|de)coder|text|vision)_?layers$", LAYERS),
    (r"^(num_encoder_blocks|num_pooler_layers)$", "keep"),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|num_global_key_value_heads", 2),
    (r"^((num_|(en|de)coder_)?attention_heads|n_heads?|num_heads)$", HEADS),
    (r"^(head_dim|attention_head_dim|qk_nope_head_dim|v_head_dim|d_kv|global_head_dim)$", 8),
    (r"^(qk_rope_head_dim|rotary_dim)$", 4),
    (r"^(q_lora_rank|kv_lora_rank|o_lora_rank)$", 8),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|"
     r"attention_hidden_size|hidden_dim|backbone_hidden_size|d_embed)$", WIDTH),
    (r"intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|inner_dim|dim_feedforward|"
     r"mlp_hidden_size|expert_ffn", 48),
    (r"^(image_size)$", IMAGE),
    (r"^(patch_size)$", 16),
    (r"^(num_labels)$", CLASSES),
    (r"projection_dim|classifier_proj_size|conv_channels", 16),
    (r"sliding_window|attention_window$|local_attention", 4),
    (r"^(state_size|mamba_d_state|ssm_state_size)$", 8),
    (r"num_mel_bins|input_feat_per_channel", 16),
)  # fmt: skip


@dataclass(frozen=True)
class Stock:
    """One class of an auto mapping."""

    mapping: str
    model_type: str
    cls: str

    @property
    def name(self) -> str:
        return f"{self.mapping}:{self.cls}"

    def make(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """A tiny model in eval mode and a batch of two rows that it accepts."""
        model_class: Any = getattr(hf, self.cls)
        torch.manual_seed(0)
        model, batch = _built(model_class, self.model_type, self.mapping)
        with torch.no_grad():
            for parameter in model.parameters():
                # Some classes leave gates and scales at zero, where nothing could be seen.
                if parameter.is_floating_point() and not bool(parameter.any()):
                    parameter.normal_(std=0.02)
        return model, batch


def stock() -> list[Stock]:
    """Every class of the mappings, once for each mapping."""
    found: dict[str, Stock] = {}
    for mapping, attribute in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, attribute).items():
            for cls in (names,) if isinstance(names, str) else names:
                entry = Stock(mapping, model_type, cls)
                found.setdefault(entry.name, entry)
    return list(found.values())


@contextmanager
def time_limit(seconds: int = SECONDS) -> Generator[None, None, None]:
    """A TimeoutError after so many seconds of the processor, in the main thread."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# Ways to shrink, tried in order until the model builds and runs: what a class derives or checks
# between its fields differs, and the fields do not say.
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"drop": r"^head_dim$"},
    {"drop": r"layer_types|_pattern$|_types$"},
    {"drop": r"^head_dim$", "set": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}},
    {"set": {"head_dim": 8}},
    {"drop": r"^head_dim$|layer_types", "set": {"num_key_value_heads": HEADS}},
    {"set": {"num_key_value_heads": HEADS, "head_dim": 16}},
    {
        "set": {
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "num_heads": 8,
            "head_dim": 8,
        }
    },
    {
        "set": {
            "d_head": 8,
            "axial_pos_embds_dim": (8, 24),
            "axial_pos_shape": (4, 2),
            "is_decoder": True,
            "pooler_hidden_size": WIDTH,
        }
    },
    {"set": {"num_hidden_layers": 8}, "drop": r"layer_types|_pattern$|_types$|_ids$"},
    {
        "set": {"num_hidden_layers": 6, "num_kv_shared_layers": 2},
        "drop": r"layer_types|_pattern$|_types$|_ids$|^intermediate_size$",
    },
    {"keep": r"hidden_sizes|dims|channels|widths|embed_dim|embedding_size|^hidden_(size|dim)$"},
    {"keep": r"head|hidden_size|dim|channels|width|d_model|rank|state"},
    {"keep": r"."},
)


def _built(model_class: Any, model_type: str, mapping: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config_class: Any = model_class.config_class or CONFIG_MAPPING[model_type]
    first: Exception | None = None
    for way in _WAYS:
        torch.manual_seed(0)
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(shrunk(config_class(), way)).parameters())
            if size > LARGEST:
                raise ValueError(f"{model_class.__name__} still has {size:,} parameters")
            model: nn.Module = model_class(shrunk(config_class(), way)).eval()
            if hasattr(model, "set_default_language"):
                model.set_default_language("en_XX")
            batch = batch_for(model, mapping)
            with torch.no_grad():
                model(**batch)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - any refusal of the class means: the next way
            first = first or error
        else:
            return model, batch
    assert first is not None
    raise first


def shrunk(config: Any, way: Mapping[str, Any]) -> Any:
    """The same config class with small numbers; sub-configs and per-layer lists follow."""
    fields = (
        {f.name for f in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else ()
    )
    known = {*fields, *inspect.signature(type(config).__init__).parameters}
    values = {k: v for k, v in vars(config).items() if k in known}
    for key in ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype"):
        values.pop(key, None)
    aliases = dict(getattr(type(config), "attribute_map", None) or {})
    shown = {real: alias for alias, real in aliases.items()}
    layers = _count(config)
    new: dict[str, Any] = {}
    for key, value in values.items():
        kept = "keep" in way and re.search(way["keep"], key)
        if isinstance(value, hf.PretrainedConfig):
            new[key] = shrunk(value, way)
        elif kept and not re.search(_COUNTS, shown.get(key, key)):
            new[key] = value
        else:
            new[key] = _shrunk_field(shown.get(key, key), key, value, layers)
    for key in ("id2label", "label2id"):
        new.pop(key, None)
    new = {k: v for k, v in new.items() if not ("drop" in way and re.search(way["drop"], k))}
    new |= {k: v for k, v in way.get("set", {}).items() if k in known or k in aliases}
    made = type(config)(**new)
    if getattr(made, "pad_token_id", None) is None or made.pad_token_id >= WORDS:
        made.pad_token_id = 0
    if getattr(made, "eos_token_id", None) is None:
        made.eos_token_id = 2
    if hasattr(made, "decoder_start_token_id") and made.decoder_start_token_id is None:
        made.decoder_start_token_id = 0
    made.num_labels = CLASSES
    return made


def _count(config: Any) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _shrunk_field(name: str, key: str, value: Any, layers: int | None) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, (list, tuple)):
        return _shrunk_list(key, list(value), layers)
    if not isinstance(value, int):
        return value
    if re.search(r"_token_id$|_token_index$|_id$", key):
        return value if value < WORDS else WORDS - 1 - (value % 7)
    for pattern, small in _RULES:
        if re.search(pattern, name) or re.search(pattern, key):
            if small is None or small == "keep":
                return value
            return min(small, value) if value > 0 else value
    return value


def _shrunk_list(key: str, value: list[Any], layers: int | None) -> list[Any]:
    if not value:
        return value
    if layers is not None and len(value) == layers:
        kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else value
        value = [kinds[i % len(kinds)] for i in range(LAYERS)]
    if all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        if key in ("depths", "layers", "num_blocks", "stage_repeats", "num_layers", "depth"):
            return [min(v, 2) for v in value]
        if re.search(r"hidden_sizes|dims|embed_dims|stage_out|neck_hidden|channels|widths", key):
            return [8 * (i + 1) if len(value) < 6 else 8 for i in range(len(value))]
        if re.search(r"intermediate", key):
            return [48] * len(value)
    return value


def batch_for(model: nn.Module, mapping: str) -> dict[str, Tensor]:
    """What the model's own forward asks for, by the names of its arguments."""
    torch.manual_seed(1)
    names = list(inspect.signature(model.forward).parameters)
    config: Any = model.config
    main = getattr(model, "main_input_name", "input_ids")
    makers: Mapping[str, Callable[[Any], Tensor]] = {
        "pixel_values": _pixels,
        "input_features": _features,
        "input_values": _waves,
    }
    batch: dict[str, Tensor] = {}
    if main in makers and main in names:
        batch[main] = makers[main](config)
    elif "input_ids" in names:
        batch["input_ids"] = torch.randint(5, WORDS - 10, (ROWS, TOKENS))
        if mapping == "sequence":  # encoder-decoders classify at the end token
            batch["input_ids"][:, -1] = getattr(config, "eos_token_id", None) or 2
        if "attention_mask" in names:
            batch["attention_mask"] = torch.ones(ROWS, TOKENS, dtype=torch.long)
        if "bbox" in names:
            batch["bbox"] = torch.randint(0, 9, (ROWS, TOKENS, 4)).sort(-1).values
    else:
        raise NotImplementedError(f"no maker for main input {main!r} among {names}")
    if "decoder_input_ids" in names and mapping != "sequence":
        batch["decoder_input_ids"] = torch.randint(5, WORDS - 10, (ROWS, TOKENS - 2))
    return batch


def _pixels(config: Any) -> Tensor:
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
    channels = getattr(config, "num_channels", None) or 3
    return torch.randn(ROWS, channels, height, width)


def _features(config: Any) -> Tensor:
    inner = (getattr(config, name, None) for name in ("audio_config", "encoder_config"))
    config = next((found for found in inner if found is not None), config)
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    bins = next((getattr(config, name) for name in names if getattr(config, name, None)), 16)
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        # Convolutions in front halve the length: exactly twice the positions are wanted.
        return torch.randn(ROWS, bins, 2 * config.max_source_positions)
    return torch.randn(ROWS, 64, bins)


def _waves(config: Any) -> Tensor:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # spectrogram
        return torch.randn(ROWS, config.max_length, config.num_mel_bins)
    return torch.randn(ROWS, 2000)
