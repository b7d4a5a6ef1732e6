"""What each tab says is what the verbs compute, and what comes from data is escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.playground import HOSTILE, classifier, demo_folder, speaker

import everydepth as ed
from everydepth.app import compare, language, measured, surfaces, vision
from everydepth.app.content import SURFACE
from everydepth.app.shelf import Item, Shelf, shelf_of
from everydepth.app.tales import NAMES, tales
from everydepth.data import load_digits
from everydepth.errors import DataError, SettingError
from everydepth.exits import Confidence
from everydepth.results import Results, gap, named, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_folder(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def shelf(folder: Path) -> Shelf:
    return shelf_of(folder)


@pytest.fixture(scope="module")
def desk(shelf: Shelf) -> vision.Desk:
    return vision.Desk(shelf["lpa"])


# -- Vision ----------------------------------------------------------------------------------------


def test_a_rise_is_the_readout_of_every_depth(desk: vision.Desk) -> None:
    x = load_digits("test").pixel_values[7:8]
    rise = desk.rise(x[0], None, label=3)
    model = classifier()
    for depth in range(1, 4):
        cut = ed.at_depth(model, depth)
        with torch.no_grad():
            chance = cut(pixel_values=x).logits.softmax(-1)[0].numpy()
        np.testing.assert_allclose(rise.chances[depth], chance, atol=1e-5)
    said = rise.chances.argmax(-1)
    assert (said[rise.settled :] == said[-1]).all()
    assert rise.settled == 0 or said[rise.settled - 1] != said[-1]


def test_a_rise_leaves_where_the_policy_says(desk: vision.Desk) -> None:
    x = load_digits("test").pixel_values[:1]
    for threshold in (0.0, 0.5, 1.0):
        policy = Confidence(threshold=threshold)
        rise = desk.rise(x[0], policy)
        assert rise.leaves == int(
            ed.predict(classifier(), {"pixel_values": x}, policy=policy).depths
        )


def test_the_calibrated_policy_says_what_it_promises(desk: vision.Desk) -> None:
    loose, note = desk.policy(0.9)
    assert loose is not None
    assert loose.certificate is not None
    assert loose.certificate.certified
    assert "at most 90% of answers change; calibrated on 180 images" in note
    _, note = desk.policy(0.001)
    assert "180 images are too few to guarantee" in note


def test_the_tower_shows_every_depth_the_dial_the_exit_and_where_it_settles() -> None:
    chances = np.array([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.8, 0.1]])
    rise = vision.Rise(chances=chances, names=("a", "b", HOSTILE), settled=1, leaves=1, label=0)
    shown = vision.tower(rise, 2)
    assert re.findall(r'data-depth="(\d)"', shown) == ["2", "1", "0"]
    floors = shown.split('<div class="ed-floor')[1:]
    assert floors[0].startswith(" ed-at ed-skipped")
    assert "exits here" in floors[1]
    assert "settled" in floors[1]
    assert [re.findall(r"<b>(.)</b>", floor)[0] for floor in floors] == ["b", "b", "a"]
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    words = vision.sentence(rise, 0)
    assert "The network says <b>b</b>, but the label is <b>a</b>." in words
    assert "settles at depth 1 of 2; the policy exits at depth 1 with <b>b</b>" in words
    assert "Cut to depth 0, it would say <b>a</b>" in words


def test_the_tiles_are_the_profile_of_the_depth(desk: vision.Desk) -> None:
    found = desk.profile
    shown = vision.tiles(found, 2, judged=True)
    assert f"<strong>{found.at(2).quality:.1%}</strong>" in shown
    assert f"<strong>{found.at(2).parameters:,}</strong>" in shown
    assert f"{found.at(2).latency.median:.2f} ms" in shown
    assert f"{found.at(2).checkpoint_bytes / 1000:.3g}kB" in shown
    assert "not known" in vision.tiles(found, 2, judged=False)


def test_pictures_are_offered_one_of_each_class_and_then_those_that_settle_last(
    desk: vision.Desk,
) -> None:
    labels = [desk.label(row) for row in desk.offered]
    assert labels[:10] == list(range(10))
    assert len(set(desk.offered)) == vision.OFFERED
    policy = Confidence(threshold=1.0)
    late = [desk.rise(desk.pixels(row), policy).settled for row in desk.offered[10:]]
    assert late == sorted(late, reverse=True)
    shown = vision.gallery(desk, desk.offered[0])
    assert shown.count("<button") == vision.OFFERED
    assert shown.count("ed-chosen") == 1


def test_names_of_classes_from_a_config_are_escaped(tmp_path: Path) -> None:
    item = Item("x", tmp_path, given=classifier(labels=(HOSTILE, "LABEL_1")))
    desk = vision.Desk(item)
    assert desk.names == (HOSTILE, "class 1")
    assert desk.offered == []
    rise = desk.rise(torch.rand(1, 8, 8), None)
    for shown in (vision.tower(rise, 1), vision.sentence(rise, 1)):
        assert "<script>" not in shown
    assert desk.policy(0.1) == (None, "No data to calibrate on: give its name with --data.")


# -- Language --------------------------------------------------------------------------------------


def test_the_grid_is_the_token_grid_with_the_top_five_in_each_cell(shelf: Shelf) -> None:
    item = shelf["tales"]
    found = language.grid(item, "One day Anna", 4)
    whole = ed.token_grid(item.stream, item.tokenizer, "One day Anna", new_tokens=4, top=5)
    assert found.arrays["text"].tolist() == whole.arrays["text"].tolist()
    shown = language.grid_table(found, 2)
    assert re.findall(r'data-depth="(\d)"', shown) == ["3", "2", "1", "0"]
    assert shown.count("data-tip=") == 4 * len(found.arrays["tokens"])
    assert shown.count('<td class="ed-settled"') == len(found.arrays["tokens"])
    assert all(tip.count("\n") == 4 for tip in re.findall(r'data-tip="([^"]*)"', shown))
    assert '<tr class="ed-at" data-depth="2">' in shown
    words, settled = language.grid_words(found), found.arrays["saturated_at"]
    assert f"{len(settled)} positions: the median next token is settled" in words
    assert f"{(settled <= 1).sum()} are settled by half the depth" in words


def test_tokens_are_escaped(shelf: Shelf) -> None:
    found = language.grid(shelf["tales"], HOSTILE, 2)
    shown = language.grid_table(found)
    assert "<script" not in shown
    assert "<img" not in shown
    one = language.Writing(
        title=HOSTILE, pieces=(HOSTILE,), drafted=(True,), tokens_per_second=1.0, note=HOSTILE
    )
    assert "<script" not in language.writings([one])


def test_texts_are_those_of_generate_and_drafts_are_marked(shelf: Shelf) -> None:
    item = shelf["tales"]
    ids = item.tokenizer.encode("One day Anna")
    shallow, full, drafted = language.write(item, "One day Anna", 1, 20)
    for one, options in (
        (shallow, {"depth": 1}),
        (full, {}),
        (drafted, {"draft_depth": 1, "draft_always": True}),
    ):
        said = ed.generate(item.stream, [ids], max_new_tokens=20, **options)
        whole = item.tokenizer.decode(ids + said.tokens[0], skip_special_tokens=True)
        assert "One day Anna" + "".join(one.pieces) == whole
        assert one.tokens_per_second > 0
    assert drafted.pieces == full.pieces
    assert "the same text" in drafted.note
    assert not any(full.drafted)
    assert len(drafted.drafted) == len(drafted.pieces)
    shown = language.writings([drafted])
    assert shown.count("<mark>") == sum(
        mark and bool(piece) for mark, piece in zip(drafted.drafted, drafted.pieces, strict=True)
    )


@pytest.mark.parametrize("sample", [False, True])
def test_a_token_is_marked_as_drafted_if_and_only_if_a_draft_was_accepted(sample: bool) -> None:
    model = speaker(40)
    options: dict[str, Any] = {"do_sample": sample, "seed": 0 if sample else None}
    said = ed.generate(
        model,
        [[1, 2], [3, 4, 5]],
        draft_depth=1,
        draft_always=True,
        max_new_tokens=24,
        eos_token_id=(),
        **options,
    )
    stats = said.stats
    assert [len(row) for row in stats.from_draft] == [24, 24]
    # A row may be done before the last of its accepted drafts; the first token is never one.
    marked = sum(map(sum, stats.from_draft))
    assert 0 < marked <= stats.accepted
    assert not any(row[0] for row in stats.from_draft)
    if not sample:
        for row, marks, prompt in zip(
            said.tokens, stats.from_draft, ([1, 2], [3, 4, 5]), strict=True
        ):
            with torch.no_grad():
                states = ed.as_stream(model).observe(torch.tensor([[*prompt, *row]]))
            drafts = states.logits(1)[0].argmax(-1)[len(prompt) - 1 : -1].tolist()
            assert all(d == t for d, t, mark in zip(drafts, row, marks, strict=True) if mark)
    assert ed.generate(model, [[1]], max_new_tokens=3).stats.from_draft == ()


def test_a_prompt_that_is_empty_or_too_long_is_said(shelf: Shelf) -> None:
    item = shelf["tales"]
    with pytest.raises(SettingError, match="the prompt is empty; type at least one word"):
        language.grid(item, "", 3)
    with pytest.raises(SettingError, match="but 2,000 is the limit here"):
        language.write(item, "x" * 2001, 1, 3)
    with pytest.raises(SettingError, match=r"allows 128; shorten it"):
        language.write(item, "x y " * 400, 1, 3)
    near = "x" * 126  # a byte a token: two places are left
    assert all(len(one.pieces) <= 3 for one in language.write(item, near, 1, 50))


def test_half_a_character_waits_for_its_other_half() -> None:
    class Bytes:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    ids = list("aé".encode())
    assert language._pieces(Bytes(), [104], ids) == ("a", "", "é")


def test_tales_say_again_at_the_end_what_they_began_with() -> None:
    for tale in tales(50, seed=3):
        name, what = re.match(r"Once upon a time (\w+) had a ([\w ]+)\.", tale).groups()  # type: ignore[union-attr]
        assert f"In the evening {name} took the {what} home" in tale
        assert tale.endswith(f"and {NAMES[name].lower()} was happy.")
    assert tales(5, seed=1) == tales(9, seed=1)[:5]
    assert tales(5, seed=1) != tales(5, seed=2)


# -- Surfaces --------------------------------------------------------------------------------------


def test_a_surface_is_what_the_model_reads_out_at_that_depth(folder: Path, shelf: Shelf) -> None:
    study = surfaces.study_of(folder, SURFACE)
    assert list(study.learned) == ["End-to-end", "LPA"]
    line = torch.linspace(-1, 1, surfaces.GRID)
    point = torch.tensor([[line[5], line[40]]])  # x, y
    model = shelf[f"surfaces/{SURFACE}/lpa"].stream.model
    with torch.no_grad():
        value = ed.at_depth(model, 2)(point).logits.item()
    assert study.learned["LPA"][2, 40, 5] == pytest.approx(value, abs=1e-5)
    assert study.target is not None
    assert study.surface is not None
    assert study.target[40, 5] == pytest.approx(study.surface(point).item(), abs=1e-6)
    target, first, second = surfaces.figures(study, 2)
    assert target.layout.title.text == "Target"
    assert first.layout.title.text.startswith("End-to-end, depth 2, MSE")
    assert second.data[0].type == "surface"
    errors = study.errors()
    assert errors["LPA"][2] == pytest.approx(((study.learned["LPA"][2] - study.target) ** 2).mean())
    line = surfaces.error_figure(study, 2)
    assert line is not None
    assert line.layout.shapes[0].x0 == 2
    assert "at depth 2" in surfaces.words(study, 2)


def test_a_model_of_ones_own_is_shown_beside_its_target_if_its_run_names_one(shelf: Shelf) -> None:
    run = shelf[f"surfaces/{SURFACE}/lpa"]
    named = surfaces.study_of_item(run)
    assert surfaces.figures(named, 1)[0].layout.title.text == "Target"
    unnamed = surfaces.study_of_item(Item("mine", run.path / "model"))
    assert unnamed.target is None
    assert len(surfaces.figures(unnamed, 1)) == 1
    assert surfaces.error_figure(unnamed, 1) is None
    assert "does not say which surface" in surfaces.words(unnamed, 1)


# -- Compare ---------------------------------------------------------------------------------------


def test_every_measurement_of_a_run_is_drawn_or_tabulated(shelf: Shelf) -> None:
    found = measured.answers(shelf, "lpa")
    assert list(found) == ["trace", "training"]
    for results in found.values():
        for name in results:
            assert "<table>" in measured.words(results, name) or results.result(name).is_gap
    trace = found["trace"]
    assert measured.first(trace) == "accuracy"
    assert "Accuracy, if the network stopped" in measured.words(trace, "accuracy")
    assert measured.figure(trace, "accuracy").data[0].y[-1] == pytest.approx(
        100 * trace["accuracy"][-1], rel=1e-5
    )
    with pytest.raises(DataError, match="'nothing' is not a run here; choose from"):
        measured.answers(shelf, "nothing")


def test_what_was_measured_is_escaped_and_a_table_of_words_has_no_figure() -> None:
    words = rows("words", {"where": [HOSTILE]}, about=HOSTILE, note=HOSTILE)
    results = Results(results=named(words))
    assert "<script>" not in measured.words(results, "words")
    assert measured.figure(results, "words") is None
    assert measured.first(Results(results=named(gap("x", "curve", "why")))) is None


def test_two_runs_are_compared_by_the_report(shelf: Shelf) -> None:
    assert compare.start(shelf) == ("end-to-end", "lpa")
    page = compare.page(shelf, "end-to-end", "lpa")
    assert "<title>end-to-end against lpa</title>" in page
    assert "How it was trained" in page


@pytest.mark.parametrize("name", ["../lpa", "/etc", "nowhere", HOSTILE])
def test_only_runs_on_the_shelf_can_be_compared(shelf: Shelf, name: str) -> None:
    with pytest.raises(DataError, match="is not a run here; choose from end-to-end, lpa"):
        compare.page(shelf, "lpa", name)
