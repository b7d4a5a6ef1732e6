from __future__ import annotations

import inspect
import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from everydepth.data import (
    Corpus,
    Images,
    Points,
    Table,
    Texts,
    data_names,
    load,
    load_digits,
    load_hub,
    load_images,
)
from everydepth.errors import DataError


def put(path: Path, text: str, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode(encoding)
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)


def pack(path: Path, files: dict[str, str], encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode(encoding))
            archive.addfile(member, io.BytesIO(text.encode(encoding)))
        link = tarfile.TarInfo("x-train/alt.atheism/evil")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)


def test_digits_and_surfaces_come_by_name_without_a_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("EVERYDEPTH_DATA", raising=False)
    digits = load("digits", kind=Images, split="test", seed=2)
    assert torch.equal(digits.labels, load_digits("test", seed=2).labels)
    points = load("surface:standing_wave_grid", kind=Points, split="test", n_train=4, n_test=3)
    assert len(points) == 3


def test_a_named_folder_is_found_by_argument_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put(tmp_path / "sst2" / "dev.tsv.xz", "sentence\tlabel\nfine \t1\nbad \t0\n")
    by_argument = load("sst2", kind=Texts, split="validation", root=tmp_path)
    assert by_argument.texts == ("fine ", "bad ")
    assert by_argument.classes == ("negative", "positive")
    monkeypatch.setenv("EVERYDEPTH_DATA", str(tmp_path))
    assert load("sst2", kind=Texts, split="valid").texts == by_argument.texts


def test_rte_reads_a_split_without_header_and_one_without_labels(tmp_path: Path):
    put(tmp_path / "rte/val.tsv.xz", "7\tA.\tB.\tnot_entailment\n")
    put(tmp_path / "rte/dev.tsv.xz", "index\tsentence1\tsentence2\tlabel\n0\tC.\tD.\tentailment\n")
    put(tmp_path / "rte/test.tsv.xz", "index\tsentence1\tsentence2\n0\tE.\tF.\n")
    valid, dev, test = (load("rte", kind=Texts, split=s, root=tmp_path) for s in
                        ("valid", "dev", "test"))  # fmt: skip
    assert (valid.texts, valid.pairs) == (("A.",), ("B.",))
    assert valid.labels is not None
    assert dev.labels is not None
    assert (valid.labels.tolist(), dev.labels.tolist(), test.labels) == ([1], [0], None)


def test_an_archive_that_unpacks_to_a_huge_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("everydepth.data.reading.MOST_UNPACKED", 2**16)
    path = tmp_path / "20newsgroups" / "20news-bydate.tar.xz"
    pack(path, {"x-train/alt.atheism/1": "a" * 2**24})
    with pytest.raises(DataError, match=r"tar.xz has .* bytes and unpacks to more than"):
        load("20newsgroups", kind=Texts, split="train", root=tmp_path)


def test_newsgroups_are_read_from_the_archive_and_links_are_skipped(tmp_path: Path):
    files = {
        "x-train/sci.med/2": "caf\u00e9",
        "x-train/alt.atheism/1": "hello",
        "x-test/sci.med/3": "later",
    }
    pack(tmp_path / "20newsgroups" / "20news-bydate.tar.xz", files, "latin-1")
    data = load("20newsgroups", kind=Texts, root=tmp_path)
    assert data.texts == ("caf\u00e9", "hello")
    assert data.classes == ("alt.atheism", "sci.med")
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0]
    assert len(load("20newsgroups", kind=Texts, split="test", root=tmp_path)) == 1
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["20news-bydate.tar.xz"]


def test_tweeteval_needs_a_task_and_says_which_there_are(tmp_path: Path):
    files = {
        "datasets/irony/mapping.txt": "0\tnon_irony\n1\tirony",
        "datasets/irony/val_text.txt": "so\u2028true \nno \n",
        "datasets/irony/val_labels.txt": "1\n0\n",
        "datasets/stance/mapping.txt": "0\tnone\n1\tagainst\n2\tfavor",
        "datasets/stance/climate/train_labels.txt": "2\n",
    }
    pack(tmp_path / "tweeteval" / "tweeteval_datasets.tar.xz", files)
    irony = load("tweeteval", kind=Texts, task="irony", split="valid", root=tmp_path)
    assert irony.texts == ("so\u2028true ", "no ")
    assert irony.classes == ("non_irony", "irony")
    assert irony.labels is not None
    assert irony.labels.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"task None, but .* has irony, stance/climate; give one"):
        load("tweeteval", root=tmp_path)
    with pytest.raises(DataError, match=r"has no stance/climate/train_text.txt; it holds stance/"):
        load("tweeteval", task="stance/climate", root=tmp_path)


@pytest.mark.parametrize("damage", [slice(None, -60), slice(0, 0)])
def test_a_broken_archive_is_named(tmp_path: Path, damage: slice):
    path = tmp_path / "20newsgroups" / "20news-bydate.tar.xz"
    pack(path, {"x-train/a/1": "text " * 500})
    path.write_bytes(path.read_bytes()[damage])
    with pytest.raises(
        DataError, match=r"bydate.tar.xz cannot be read as a tar archive .*download it again"
    ):
        load("20newsgroups", root=tmp_path)


def test_an_archive_of_something_else_is_refused(tmp_path: Path):
    pack(tmp_path / "20newsgroups" / "20news-bydate.tar.xz", {"readme": "no"})
    with pytest.raises(DataError, match=r"has no messages under a folder ending in '-train'"):
        load("20newsgroups", root=tmp_path)


def test_corpora_tables_and_pairs_come_by_name(tmp_path: Path):
    put(tmp_path / "tinyshakespeare/input.txt.xz", "Speak, speak.")
    put(tmp_path / "chinchilla/svg_extracted_data.csv", "Model Size,loss\n1e8,2.5\n")
    put(tmp_path / "gsm8k/test.jsonl.xz", '{"question": "1+1?", "answer": "#### 2"}\n')
    put(tmp_path / "emotion/val.txt", "text;label_name\ni feel; well;joy\n")
    header = "\u00ef\u00bb\u00bfQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    put(tmp_path / "mrpc/msr_paraphrase_train.txt.xz", f"{header}\n1\t2\t3\tA\tB\n")
    assert load("tinyshakespeare", kind=Corpus, root=tmp_path).text == "Speak, speak."
    assert load("chinchilla", kind=Table, root=tmp_path).numbers("loss").tolist() == [2.5]
    assert load("gsm8k", kind=Texts, split="test", root=tmp_path).pairs == ("#### 2",)
    assert load("emotion", kind=Texts, split="dev", root=tmp_path).texts == ("i feel; well",)
    assert load("mrpc", kind=Texts, root=tmp_path).pairs == ("B",)


def test_a_path_is_read_by_what_is_in_it(tmp_path: Path):
    put(tmp_path / "words" / "train.txt.xz", "a b")
    put(tmp_path / "rows" / "test.tsv", "t\tl\nx\t1\n")
    assert load(tmp_path / "words", kind=Corpus).text == "a b"
    assert load(str(tmp_path / "words" / "train.txt.xz"), kind=Corpus).text == "a b"
    assert load(tmp_path / "rows", kind=Table, split="test")["t"] == ("x",)
    assert load(tmp_path / "rows", kind=Texts, split="test", text="t", label="l").texts == ("x",)
    with pytest.raises(DataError, match=r"split 'train', but .*rows has 'test'; use one of these"):
        load(tmp_path / "rows")


def test_a_folder_of_images_may_hold_texts_too(tmp_path: Path):
    (tmp_path / "test_batch.bin").write_bytes(np.zeros(3073, dtype=np.uint8))
    (tmp_path / "readme.txt").write_text("about")
    assert len(load(tmp_path, kind=Images, split="test")) == 1


def test_a_dataset_of_another_kind_than_requested_is_refused():
    with pytest.raises(DataError, match=r"'digits' holds Images, but kind=Texts was requested"):
        load("digits", kind=Texts)


def test_an_unknown_name_is_answered_with_the_closest_and_a_way_out():
    message = (
        r"'cifar-10' is neither a known dataset nor a file or folder; did you mean 'cifar10'\? "
        r"Otherwise give the path of a file or folder, or 'hf:cifar-10' for the Hugging Face Hub"
    )
    with pytest.raises(DataError, match=message):
        load("cifar-10")
    with pytest.raises(DataError, match=r"known are digits, surface:.*, chinchilla\. Otherwise"):
        load("zzz")


def test_a_missing_root_or_folder_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("EVERYDEPTH_DATA", raising=False)
    with pytest.raises(
        DataError,
        match=r"the folder that holds 'sst2' is unknown; give root= or set EVERYDEPTH_DATA",
    ):
        load("sst2")
    (tmp_path / "cola").mkdir()
    with pytest.raises(DataError, match=r"no folder sst2 in .*, which holds cola; put it there"):
        load("sst2", root=tmp_path)
    with pytest.raises(
        DataError, match=r"no in_domain_train.tsv, in_domain_train.tsv.xz or .*noth"
    ):
        load("cola", root=tmp_path)
    with pytest.raises(DataError, match=r"split 'extra', but cola has 'train', 'valid', 'test'"):
        load("cola", split="extra", root=tmp_path)


def test_every_known_name_is_listed_once():
    assert len(set(data_names())) == len(data_names()) == 1 + 8 + 15


def test_every_loader_takes_the_split_second_and_the_rest_by_name(tmp_path: Path):
    (tmp_path / "train.txt").write_text("a\n")
    (tmp_path / "test.txt").write_text("b\n")
    assert load(tmp_path, "test", kind=Corpus).text == "b\n"
    assert len(load("digits", "test")) == len(load_digits("test"))
    for loader in (load, load_hub, load_images):
        name, split, *rest = inspect.signature(loader).parameters.values()
        assert (split.name, split.default) == ("split", "train")
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in rest), name
