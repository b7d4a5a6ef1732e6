"""The loss at the last depth is the loss that the model itself computes from labels."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES
from tests.zoo.stock import Stock, stock
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import BatchError
from everydepth.stream import Targets, real_tokens
from everydepth.stream.discovery import DiscoveredStream

CLASSES = (
    "causal:LlamaForCausalLM",
    "causal:GPT2LMHeadModel",
    "causal:GraniteForCausalLM",
    "causal:Gemma2ForCausalLM",
    "causal:FalconForCausalLM",
    "masked:BertForMaskedLM",
    "masked:ElectraForMaskedLM",
    "masked:ModernBertForMaskedLM",
    "token:RobertaForTokenClassification",
    "token:GPT2ForTokenClassification",
    "token:T5ForTokenClassification",
    "sequence:DistilBertForSequenceClassification",
    "sequence:BartForSequenceClassification",
    "sequence:Qwen3ForSequenceClassification",
    "image:ViTForImageClassification",
    "image:ConvNextForImageClassification",
    "image:SwinForImageClassification",
    "audio:Wav2Vec2ForSequenceClassification",
    "audio:WhisperForAudioClassification",
    "seq2seq:T5ForConditionalGeneration",
    "seq2seq:BartForConditionalGeneration",
    "seq2seq:PegasusForConditionalGeneration",
    "seq2seq:MBartForConditionalGeneration",
    "seq2seq:BlenderbotForConditionalGeneration",
    "seq2seq:M2M100ForConditionalGeneration",
)
KNOWN = {entry.name: entry for entry in stock()}


def labeled(entry: Stock) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float64, and a batch with padding and ignored labels."""
    model, batch = entry.make()
    model = model.double()
    model.config.decoder_start_token_id = 1
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad():
        z = model(**batch).logits
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, z.shape[-1], z.shape[:-1], generator=generator)
    if labels.ndim == 2:
        labels[0, 1], labels[1, -2:] = -100, -100
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -2:] = 0
    if batch.pop("decoder_input_ids", None) is not None:
        # As many tokens as the decoder: the encoder's padding must not pass for the decoder's.
        batch = {key: value[:, : labels.shape[1]] for key, value in batch.items()}
        batch["attention_mask"][0, -3:] = 0
    return model, {**batch, "labels": labels}


@torch.no_grad()
def losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, float]:
    """The model's own loss, and that of the last depth."""
    stream = DiscoveredStream(model)
    states = stream.observe(batch)
    targets = Targets.of(stream, batch)
    found = float(targets.loss(targets.pick(states.logits(stream.depth))))
    name = "mse" if stream.task == "regression" else "loss"
    traced = ed.trace(stream, [batch], metrics=[name], progress=False)[name]
    assert float(traced[-1]) == pytest.approx(found, rel=1e-6)
    return float(model(**batch).loss), found


@pytest.mark.parametrize("name", CLASSES)
def test_the_last_depth_has_the_loss_of_the_model(name: str) -> None:
    own, found = losses(*labeled(KNOWN[name]))
    assert found == pytest.approx(own, rel=1e-6)  # many models compute it in float32


def test_the_clause_of_the_loss_holds_and_leaves_the_config_alone() -> None:
    model, batch = labeled(KNOWN["sequence:DistilBertForSequenceClassification"])
    model.config.problem_type = None
    report = ed.check_stream(model, batch).raise_if_failed()
    assert {c.name: c.passed for c in report.checks}["the loss is the model's own"]
    assert model.config.problem_type is None


def test_a_regression_has_the_loss_of_the_model() -> None:
    config = KNOWN["sequence:DistilBertForSequenceClassification"].make()[0].config
    config.num_labels = 1
    batch = {"input_ids": torch.arange(5, 17).view(2, 6), "labels": torch.randn(2)}
    own, found = losses(hf.DistilBertForSequenceClassification(config).eval().double(), batch)
    assert found == pytest.approx(own, rel=1e-6)


def test_a_wrong_loss_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES["Bert-MaskedLM"]
    model, batch = entry.make()
    batch["labels"] = batch["input_ids"].clone()
    right = Targets.loss
    monkeypatch.setattr(Targets, "loss", lambda self, z: 1.01 * right(self, z))
    broken = [c for c in ed.check_stream(model, batch).checks if c.passed is False]
    assert [c.name for c in broken] == ["the loss is the model's own"]
    assert "the loss at the last depth is" in broken[0].detail


def test_a_class_that_takes_labels_already_shifted_is_told_from_a_wrong_loss() -> None:
    model, batch = KNOWN["causal:BartForCausalLM"].make()
    report = ed.check_stream(model, {**batch, "labels": batch["input_ids"]})
    clause = next(c for c in report.checks if c.name == "the loss is the model's own")
    assert clause.passed is None
    assert clause.detail == "position t predicts label t + 1; in the loss of this class, label t"


def test_an_encoder_decoder_says_so_and_its_masks_are_told_apart() -> None:
    model, batch = labeled(KNOWN["seq2seq:BartForConditionalGeneration"])
    decoder, encoder = ed.as_stream(model), ed.as_stream(model, stream="encoder")
    assert "task seq2seq_lm" in str(decoder)
    batch["decoder_attention_mask"] = torch.ones_like(batch["attention_mask"])
    batch["decoder_attention_mask"][1, -2:] = 0
    shape, cpu = tuple(batch["labels"].shape), torch.device("cpu")
    for stream, key in ((decoder, "decoder_attention_mask"), (encoder, "attention_mask")):
        real = real_tokens(stream, batch, shape, cpu)
        assert real is not None
        assert torch.equal(real, batch[key] != 0)


def test_speech_with_labels_alone_is_a_batch() -> None:
    config = hf.WhisperConfig(
        vocab_size=60, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_source_positions=10, max_target_positions=12,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.WhisperForConditionalGeneration(config).eval().double()
    labels = torch.randint(4, 60, (2, 6))
    labels[1, 4:] = -100
    sound = torch.randn(2, 8, 20, dtype=torch.float64)
    own, found = losses(model, {"input_features": sound, "labels": labels})
    assert found == pytest.approx(own, rel=1e-6)


def test_labels_without_a_token_to_start_with_name_the_setting() -> None:
    model, batch = labeled(KNOWN["seq2seq:T5ForConditionalGeneration"])
    model.config.decoder_start_token_id = None
    with pytest.raises(BatchError, match=r"set config\.decoder_start_token_id"):
        ed.as_stream(model).observe(batch)
