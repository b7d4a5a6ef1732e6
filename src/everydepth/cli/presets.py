"""Small networks by name, sized to fit the data: nothing to download, trained in minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from everydepth.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of the data that determine a network's shape; None if they do not apply."""

    classes: int | None = None
    channels: int | None = None
    size: int | None = None
    inputs: int | None = None
    outputs: int | None = None
    text: bool = False

    @classmethod
    def of(cls, data: Any) -> Facts:
        from everydepth.data import Corpus, Images, Points, Texts

        if isinstance(data, Images):
            _, channels, height, width = data.pixel_values.shape
            return cls(classes=len(data.classes), channels=channels, size=max(height, width))
        if isinstance(data, Points):
            return cls(inputs=data.inputs.shape[1], outputs=data.labels.shape[1])
        if isinstance(data, Texts):
            return cls(classes=len(data.classes) or None, text=True)
        return cls(text=isinstance(data, Corpus))


@dataclass(frozen=True)
class Preset:
    """A small network. `needs` describes the data it is for, and `fits` checks it."""

    description: str
    blocks: int
    build: Callable[[Facts, int], PreTrainedModel]
    needs: str
    fits: Callable[[Facts], bool]

    def __call__(self, name: str, facts: Facts, blocks: int | None) -> PreTrainedModel:
        if not self.fits(facts):
            raise DataError(
                f"the preset {name!r} is for {self.needs}, but the data is something else; use "
                "another preset, or other data"
            )
        return self.build(facts, self.blocks if blocks is None else blocks)


def _vit(facts: Facts, blocks: int) -> PreTrainedModel:
    from transformers import ViTConfig, ViTForImageClassification

    size = facts.size or 28
    return ViTForImageClassification(
        ViTConfig(
            image_size=size,
            patch_size=2 * max(1, round(size / 16)),  # 28 and 32: 4, so 49 and 64 patches
            num_channels=facts.channels or 3,
            hidden_size=64,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **_labels(facts),
        )
    )


def _resnet(facts: Facts, blocks: int) -> PreTrainedModel:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    stages = [blocks // 3 + (1 if stage < blocks % 3 else 0) for stage in range(3)]
    return CifarResNet(
        CifarResNetConfig(
            blocks_per_stage=stages,
            num_channels=facts.channels or 3,
            num_labels=facts.classes or 10,
        )
    )


def _mlp(facts: Facts, blocks: int) -> PreTrainedModel:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    return ResidualMLP(
        ResidualMLPConfig(
            num_inputs=facts.inputs or 2, num_outputs=facts.outputs or 1, num_hidden_layers=blocks
        )
    )


def _labels(facts: Facts) -> dict[str, Any]:
    return {"num_labels": facts.classes or 2}


def _sizes(blocks: int) -> dict[str, Any]:
    return {
        "vocab_size": 257,
        "hidden_size": 64,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "pad_token_id": 256,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }


def _gpt2(facts: Facts, blocks: int) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = _sizes(blocks)
    sizes["n_inner"] = sizes.pop("intermediate_size")
    return GPT2LMHeadModel(GPT2Config(**sizes))


def _llama(facts: Facts, blocks: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(blocks)))


def _bert(facts: Facts, blocks: int) -> PreTrainedModel:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_sizes(blocks), **_labels(facts)))


def _images(facts: Facts) -> bool:
    return facts.size is not None


def _text(facts: Facts) -> bool:
    return facts.text


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "vit-tiny": Preset("vision transformer, width 64", 6, _vit, "images", _images),
        "resnet20": Preset("6n+2 ResNet, widths 16, 32, 64", 9, _resnet, "images", _images),
        "mlp": Preset(
            "residual perceptron, width 30",
            6,
            _mlp,
            "points of a regression (surface:...)",
            lambda facts: facts.inputs is not None,
        ),
        "bert-tiny": Preset(
            "text encoder on bytes, width 64",
            4,
            _bert,
            "texts with classes",
            lambda facts: facts.text and facts.classes is not None,
        ),
        "gpt2-tiny": Preset("language model on bytes, width 64", 4, _gpt2, "text", _text),
        "llama-tiny": Preset("language model on bytes, width 64", 4, _llama, "text", _text),
    }
)
