"""Loading a depth: the right tensors, and only those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tests.helpers.training import vit
from tests.zoo import ENTRIES, MODELS

from everydepth.errors import DataError, DepthError, EveryDepthError, UnsupportedModelError
from everydepth.exits import load
from everydepth.exits.lazy import LazyTensor, lazy_tensors
from everydepth.exits.load import (
    _parsing,  # pyright: ignore[reportPrivateUsage]
    model_folder,
)
from everydepth.files import tensor_header
from everydepth.runs import Run
from everydepth.stream import as_stream
from everydepth.tracing import sentence_encoder


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_depth_of_a_checkpoint_is_the_readout_at_that_depth(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    model, batch = entry.make()
    model.save_pretrained(tmp_path)
    stream = as_stream(model, **entry.options)
    depth = max(1, stream.depth // 2)
    small = as_stream(load(tmp_path, depth=depth, **entry.options), **entry.options)
    assert small.depth == depth
    assert not any(t.is_meta for t in (*small.model.parameters(), *small.model.buffers()))
    with torch.no_grad():
        found = small.prediction(small.call(small.arguments(batch, None)))
        expected = stream.observe(batch).logits(depth)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_in_many_files_and_half_precision_loads_at_a_depth(tmp_path: Path) -> None:
    model, batch = ENTRIES["Llama-untied-CausalLM-right"].make()
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    small = load(tmp_path, depth=2)
    assert small.dtype == torch.bfloat16
    with torch.no_grad():
        expected = as_stream(load(tmp_path)).observe(batch).logits(2)
        torch.testing.assert_close(small(**batch).logits, expected)


def test_blocks_beyond_the_depth_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = ENTRIES["Llama-tied-CausalLM-left"].make()
    model.save_pretrained(tmp_path)
    read: list[str] = []
    whole = lazy_tensors(tmp_path)
    names = {tensor.start: name for name, tensor in whole.items()}
    get = LazyTensor.__getitem__

    def noting(self: LazyTensor, index: Any) -> torch.Tensor:
        read.append(names[self.start])
        return get(self, index)

    monkeypatch.setattr(LazyTensor, "__getitem__", noting)
    small = load(tmp_path, depth=2)
    assert sorted(read) == sorted(
        name for name in whole if ".layers.2" not in name and ".layers.3" not in name
    )
    own = sum(p.numel() * p.element_size() for p in small.parameters())
    assert sum(whole[name].length for name in read) == own


def test_lazy_tensors_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)
    tensors = {str(kind): (torch.randn(3, 4) * 9).to(kind) for kind in kinds}
    tensors |= {"empty": torch.zeros(0, 3), "number": torch.tensor(2.5), "flag": torch.ones(2) > 0}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = lazy_tensors(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name][...].dtype == tensor.dtype
        assert torch.equal(found[name][...], tensor)


def test_generation_settings_come_along(tmp_path: Path) -> None:
    model, _ = ENTRIES["Llama-tied-CausalLM-left"].make()
    settings: Any = model.generation_config
    settings.max_new_tokens = 17
    model.save_pretrained(tmp_path)
    small: Any = load(tmp_path, depth=1)
    assert small.generation_config.max_new_tokens == 17


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_a_torn_file_is_refused(cut: int, tmp_path: Path) -> None:
    model, _ = ENTRIES["ViT"].make()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"cannot be read .*restore its safetensors files"):
        load(tmp_path, depth=1)


@pytest.mark.parametrize(
    ("saved", "claimed"), [("F32", "I32"), ("BF16", "I16"), ("BF16", "F16"), ("F16", "BF16")]
)
def test_bits_of_another_type_are_refused_also_without_checksums(
    saved: str, claimed: str, tmp_path: Path
) -> None:
    model, _ = ENTRIES["ViT"].make()
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    model.to(kinds[saved]).save_pretrained(tmp_path)
    load(tmp_path)
    file = tmp_path / "model.safetensors"
    header, start = tensor_header(file)
    header["classifier.weight"]["dtype"] = claimed
    lied = json.dumps(header).encode()
    file.write_bytes(len(lied).to_bytes(8, "little") + lied + file.read_bytes()[start:])
    for depth in (None, 1):
        with pytest.raises(DataError, match=r"holds .*\.weight as .*float16|as int(16|32), unlike"):
            load(tmp_path, depth=depth)


def test_bad_input_is_refused_with_the_next_step(tmp_path: Path) -> None:
    model, _ = ENTRIES["ViT"].make()
    model.save_pretrained(tmp_path / "vit")
    for depth in (0, 5):
        with pytest.raises(DepthError, match=f"depth {depth}, but ViT.* has 4 blocks; use 1 to 4"):
            load(tmp_path / "vit", depth=depth)
    with pytest.raises(DataError, match=r"nowhere' is neither a local folder"):
        load(tmp_path / "nowhere", depth=1)
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    other = config | {"architectures": ["MyOwnModel"]}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(other))
    with pytest.raises(UnsupportedModelError, match=r"'MyOwnModel' is not a model class"):
        load(tmp_path / "vit", depth=1)
    wider = config | {"hidden_size": 64}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(wider))
    with pytest.raises(DataError, match="saved from another class"):
        load(tmp_path / "vit", depth=1)


def test_models_of_our_own_and_of_transformers_load_by_their_folder(tmp_path: Path) -> None:
    """Whether or not a stream is known of their class."""
    phi = hf.PhiConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    names = ("ViT", "CifarResNet-post-pad", "ResidualMLP-norm1-skips1-regression1")
    models = [*(ENTRIES[name].make()[0] for name in names), hf.PhiForCausalLM(phi)]
    for model in models:
        folder = tmp_path / type(model).__name__
        model.train().save_pretrained(folder)
        loaded = load(str(folder))
        assert type(loaded) is type(model)
        assert not loaded.training
        for key, value in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value)


def test_a_model_whose_stream_is_discovered_loads_at_a_depth(tmp_path: Path) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = hf.PhiForCausalLM(hf.PhiConfig(**sizes, num_hidden_layers=3)).eval()
    model.save_pretrained(tmp_path)
    small = load(tmp_path, depth=2)
    assert small.config.num_hidden_layers == 2
    ids = torch.arange(6)[None]
    with torch.no_grad():
        expected = as_stream(model).observe({"input_ids": ids}).logits(2)
        torch.testing.assert_close(small(ids).logits, expected)


def test_a_model_that_cannot_be_loaded_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'no/such-model' is neither a local folder nor found"):
        load("no/such-model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"holds nothing and no readable config.json .*; give a dir"
    ):
        load(tmp_path / "empty")
    model, _ = ENTRIES["ViT"].make()
    model.save_pretrained(tmp_path / "vit")
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    for named, message in (
        (None, "has the architectures None, but exactly one is needed"),
        (["os"], "'os' is not a model class everydepth knows"),
        (["AutoModel"], "'AutoModel' is not a model class"),
        ("ViTModel", "has the architectures 'ViTModel'"),
    ):
        changed = json.dumps({**config, "architectures": named})
        (tmp_path / "vit" / "config.json").write_text(changed)
        with pytest.raises(EveryDepthError, match=message):
            load(tmp_path / "vit")


def test_a_package_that_quantized_weights_need_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vit().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    quantized = {"quantization_config": {"load_in_8bit": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_bnb_8bit.is_bitsandbytes_available", lambda: False
    )
    with pytest.raises(DataError, match=r"cannot be opened \(ImportError: .*pip install"):
        load(tmp_path)


def test_a_run_that_has_not_finished_is_named_as_such(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", {"epochs": 3})
    with pytest.raises(DataError, match=r"run is a run without a model; .* resume=True \(--resume"):
        load(tmp_path / "run")


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (2, r"has more blocks than its config.json: \d+ additional tensors"),
        (0, r"has more blocks than its config.json: \d+ additional tensors"),
        (-1, r"has more blocks than its config.json: \d+ additional tensors"),
        (4, r"lacks \d+ tensors of ViT"),
        (10**9, r"config.json asks for more than \d+ parameters"),
    ],
)
def test_a_config_of_another_depth_than_the_weights_is_refused(
    layers: int, words: str, tmp_path: Path
) -> None:
    vit().save_pretrained(tmp_path)  # of 3 blocks
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers}))
    with pytest.raises(DataError, match=words):
        load(tmp_path)


def test_a_run_directory_gives_the_model_inside_it(tmp_path: Path) -> None:
    assert model_folder(tmp_path) == str(tmp_path)
    ENTRIES["ViT"].make()[0].save_pretrained(tmp_path / "model")
    assert model_folder(tmp_path) == str(tmp_path / "model")
    assert type(load(tmp_path, depth=1)).__name__ == "ViTForImageClassification"


def test_a_bit_that_flipped_in_the_model_of_a_run_is_noticed(tmp_path: Path) -> None:
    """Where it is read: another depth does not need that tensor."""
    run = Run.create(tmp_path / "run", {})
    run.write_folder("model", lambda folder: vit().save_pretrained(folder))
    file = tmp_path / "run" / "model" / "model.safetensors"
    held = next(found for name, found in lazy_tensors(file.parent).items() if ".2." in name)
    assert load(tmp_path / "run").config.num_hidden_layers == 3
    content = bytearray(file.read_bytes())
    content[held.start + 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged: a checksum differs.*delete ch"):
        load(tmp_path / "run")
    assert load(tmp_path / "run", depth=2).config.num_hidden_layers == 2
    (file.parent / "checksums.json").unlink()
    load(tmp_path / "run")


@pytest.mark.parametrize("place", ["../outside.bin", "../outside.safetensors", "inside.bin"])
def test_an_index_leads_to_safetensors_inside_the_folder_only(tmp_path: Path, place: str) -> None:
    """The file is there, and would be opened."""
    folder = tmp_path / "model"
    ENTRIES["ViT"].make()[0].save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / place)
    index = {"weight_map": {"vit.embeddings.cls_token": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"refers to weights in .*only safetensors files inside"):
        load(folder)
    with pytest.raises(DataError, match=r"refers to weights in .*only safetensors files inside"):
        sentence_encoder(folder)


def test_a_link_to_weights_outside_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ENTRIES["ViT"].make()[0].save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(DataError, match=r"only safetensors files inside the folder are read"):
        load(folder)


def test_a_name_on_the_hub_is_read_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of the hub's cache: links into a folder of blobs, as no network is there."""
    model, _ = ENTRIES["Llama-tied-CausalLM-left"].make()
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    home = tmp_path / "hub" / "models--me--mine"
    snapshot = home / "snapshots" / "0" / ""
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0")
    (tmp_path / "saved").rename(home / "blobs")
    for file in (home / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    small = load("me/mine", depth=2)
    assert small.config.num_hidden_layers == 2
    (snapshot / "model.safetensors.index.json").unlink()
    with pytest.raises(DataError, match=r"'me/mine' on the Hugging Face Hub has no model.safet"):
        load("me/mine")


def test_a_parser_of_tokenizers_that_panics_is_put_into_words_and_an_interrupt_is_not() -> None:
    class PanicException(BaseException):
        """As Rust's panics arrive: no Exception."""

    said = r"words is not a tokenizer \(range end index 9\)"
    with pytest.raises(DataError, match=said), _parsing("words"):
        raise PanicException("range end index 9")
    with pytest.raises(KeyboardInterrupt), _parsing("words"):
        raise KeyboardInterrupt
