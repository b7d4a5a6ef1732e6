"""Bars and messages share a terminal."""

from __future__ import annotations

import re

import pytest

from everydepth.progress import put_away, say, shown, timed


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def screen(written: str) -> list[str]:
    """The lines left on a terminal that was sent this."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\??[\d;]*[A-Za-z]|\r|\n)", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part and part != "\r" and not part.startswith("\x1b"):
            lines[row] += part
    return [line for line in lines if line]


def test_a_message_gets_a_line_of_its_own_above_the_bar(
    terminal: None, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in shown(range(3), "trace"):
        if number == 1:
            say("about 20 s [of which half is readout]")
    assert screen(capfd.readouterr().err) == ["about 20 s [of which half is readout]"]


def test_a_bar_is_gone_before_an_error_is_shown(
    terminal: None, capfd: pytest.CaptureFixture[str]
) -> None:
    items = shown(range(3), "trace")  # held, as by the traceback of the error
    assert next(items) == 0
    put_away()
    say("error: no more")
    assert list(items) == [1, 2]
    assert screen(capfd.readouterr().err) == ["error: no more"]


def test_a_bar_beside_timed_work_is_drawn_only_when_told(
    terminal: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with timed("timing", 2.0) as done:
        first = capfd.readouterr().err
        assert "timing" in first
        assert capfd.readouterr().err == ""
        done(1.0)
        assert "timing" in capfd.readouterr().err
    with timed("timing", 2.0, enabled=False) as done:
        done(1.0)
    assert "timing" not in screen(capfd.readouterr().err)


def test_nothing_is_shown_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert list(shown(range(3), "trace")) == [0, 1, 2]
    with timed("timing", 2.0) as done:
        done(1.0)
    say("about 20 s")
    assert capfd.readouterr().err == ""
