"""A folder of a stranger: nothing in it runs, and nothing outside of it is read."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.playground import classifier, save_language_run, save_run

from everydepth.app.shelf import Item, item_at, shelf_of
from everydepth.app.vision import Desk
from everydepth.errors import DataError, EveryDepthError
from everydepth.exits.load import load, load_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    save_run(folder / "seen", classifier())
    save_language_run(folder / "said")
    return folder


@pytest.fixture
def seen(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "seen", tmp_path / "run"))


@pytest.fixture
def said(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "said", tmp_path / "run"))


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_an_honest_run_opens_as_the_model_that_was_saved(seen: Path) -> None:
    model = load(seen, trusted=False)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(model(pixel_values=x).logits, classifier()(pixel_values=x).logits)
    assert item_at(seen).tab == "vision"
    assert item_at(seen / "model").tab == "vision"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder_is_refused(seen: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.move(seen / "model" / name, outside)
    (seen / "model" / name).symlink_to(outside)
    with pytest.raises(DataError, match=r"leads out of .* replace the link by a copy"):
        load(seen, trusted=False)


def test_a_link_in_the_place_of_the_whole_model_is_refused(seen: Path, tmp_path: Path) -> None:
    shutil.move(seen / "model", tmp_path / "elsewhere")
    (seen / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="leads out of"):
        load(seen, trusted=False)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_link_to_itself_is_refused(seen: Path, trusted: bool) -> None:
    (seen / "model" / "model.safetensors").unlink()
    (seen / "model" / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(DataError, match=r"weights in .* cannot be read \(.*symbolic links"):
        load(seen, trusted=trusted)


def test_a_link_to_a_tokenizer_outside_is_refused(said: Path, tmp_path: Path) -> None:
    shutil.move(said / "model" / "tokenizer.json", tmp_path / "outside.json")
    (said / "model" / "tokenizer.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(DataError, match="leads out of"):
        load_tokenizer(said, trusted=False)


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/outside.safetensors"])
def test_an_index_of_weights_cannot_point_outside(seen: Path, tmp_path: Path, name: str) -> None:
    """The file exists outside and would be read if the path were followed."""
    outside = tmp_path / "outside.safetensors"
    shutil.move(seen / "model" / "model.safetensors", outside)
    place = str(outside) if name.startswith("/") else name
    index = {"weight_map": {"vit.embeddings.cls_token": place}}
    (seen / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="only safetensors files inside the folder are read"):
        load(seen, trusted=False)


def test_code_beside_a_model_is_never_imported(seen: Path, tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    (seen / "model" / "modeling_evil.py").write_text(f"open({str(flag)!r}, 'w')")
    change(seen / "model" / "config.json", auto_map={"AutoModel": "modeling_evil.Evil"})
    with pytest.raises(DataError, match="auto_map, which refers to code or weights elsewhere"):
        load(seen, trusted=False)
    assert not flag.exists()
    assert not any("modeling_evil" in name for name in sys.modules)


@pytest.mark.parametrize(
    "setting",
    [
        {"attn_implementation": "stranger/kernel"},
        {"_attn_implementation": "stranger/kernel"},
        {"text_config": {"attn_implementation": "stranger/kernel"}},
        {"quantization_config": {"quant_method": "x"}},
    ],
    ids=str,
)
def test_settings_that_ask_for_code_are_refused(seen: Path, setting: dict[str, Any]) -> None:
    change(seen / "model" / "config.json", **setting)
    with pytest.raises(DataError, match=r"code"):
        load(seen, trusted=False)
    if "quantization_config" not in setting:  # kernels are fetched and run, whoever is trusted
        with pytest.raises(DataError, match=r"stranger/kernel', which is code from a hub"):
            load(seen)


def test_nobody_is_asked_whether_code_beside_a_tokenizer_may_run(
    said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (said / "model" / "evil.py").write_text("raise SystemExit")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (said / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(said)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(seen: Path, name: str) -> None:
    (seen / "model" / name).unlink()
    os.mkfifo(seen / "model" / name)
    with pytest.raises(DataError):
        load(seen / "model")


def test_a_class_that_is_not_a_known_model_is_refused(seen: Path) -> None:
    change(seen / "model" / "config.json", architectures=["os.system"])
    with pytest.raises(EveryDepthError, match="not a model class everydepth knows"):
        load(seen, trusted=False)


def test_pickled_weights_are_not_read(seen: Path) -> None:
    (seen / "model" / "model.safetensors").unlink()
    torch.save({}, seen / "model" / "pytorch_model.bin")
    with pytest.raises(DataError, match="restore its safetensors files"):
        load(seen, trusted=False)


def test_a_tokenizer_is_read_from_its_json_alone(said: Path, tmp_path: Path) -> None:
    """Its other files may name a class to import or a path to read; they are not even opened."""
    flag = tmp_path / "ran"
    (said / "model" / "evil.py").write_text(f"open({str(flag)!r}, 'w')")
    settings = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "vocab_file": "/etc/passwd",
    }
    (said / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(said, trusted=False)
    assert tokenizer.decode(tokenizer.encode("Anna had a kite.")) == "Anna had a kite."
    assert not flag.exists()


def test_a_broken_tokenizer_is_said(said: Path) -> None:
    (said / "model" / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(said, trusted=False)
    (said / "model" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer.json; save a fast tokenizer"):
        load_tokenizer(said, trusted=False)


@pytest.mark.parametrize("data", ["/etc", "../../secret", "~/pictures", 3, ["digits"]])
def test_a_config_cannot_choose_which_folder_is_read_as_data(
    tmp_path: Path, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "run", classifier(labels=("a", "b")))
    change_config(tmp_path / "run", data)
    item = item_at(tmp_path / "run")
    monkeypatch.setattr("everydepth.app.vision.load", lambda *_, **__: pytest.fail("read"))
    assert item.data is None
    assert Desk(item).test is None


def change_config(run: Path, data: Any) -> None:
    content = json.loads((run / "config.json").read_text())
    content["config"]["about"] = {"data": data}
    (run / "config.json").write_text(json.dumps(content))


def test_a_config_may_name_a_data_set(tmp_path: Path) -> None:
    save_run(tmp_path / "run", classifier())
    change_config(tmp_path / "run", "digits")
    assert item_at(tmp_path / "run").data == "digits"


def test_a_saved_profile_is_shown_unless_it_is_of_another_model(seen: Path) -> None:
    desk = Desk(item_at(seen))
    desk.profile.save(seen / "profile")
    assert Desk(item_at(seen)).profile.depths == desk.profile.depths
    changed = desk.profile.with_about(model="<script>", samples=12345)
    changed.save(seen / "profile")
    assert Desk(item_at(seen)).profile.samples != 12345


# -- the shelf -------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds notes.txt, which is neither a run .* nor a model"):
        item_at(tmp_path)
    with pytest.raises(DataError, match=r"is not a folder; give a run directory"):
        item_at(tmp_path / "nowhere")


def test_the_shelf_finds_runs_below_a_folder_and_follows_no_link(
    made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made / "seen", tmp_path / "a" / "lpa")
    (tmp_path / "b").symlink_to(made / "said")
    shelf = shelf_of(tmp_path, Item("mine", made / "said"))
    assert list(shelf.items) == ["mine", "a/lpa"]
    assert (shelf.of("language"), shelf.of("vision")) == (["mine"], ["a/lpa"])
    assert shelf.runs() == ["mine", "a/lpa"]
    with pytest.raises(DataError, match=r"'x' is not on the shelf; it holds mine, a/lpa"):
        shelf["x"]


def test_a_broken_run_among_others_is_left_out_and_said(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "seen", tmp_path / "good")
    shutil.copytree(made / "seen", tmp_path / "torn")
    (tmp_path / "torn" / "model" / "model.safetensors").write_bytes(b"x")
    shelf = shelf_of(tmp_path)
    assert shelf.of("vision") == ["good"]
    assert "cannot be read" in shelf.problems["torn"]
