"""What is said of work that takes long, on a terminal and off it."""

from __future__ import annotations

import io
import sys
from itertools import pairwise

import pytest

from jaxserve.engine import progress
from jaxserve.engine.progress import ProgressLines, choose_progress, format_amount, say_progress, show_progress


def list_lines(seconds: float) -> list[tuple[float, str]]:
    lines, now, said = ProgressLines("Compiling programs"), 0.0, []
    while (now := lines.next_line) < seconds:
        lines.report(int(28 * now / seconds), 28, "forward 512 x 32")
        said.append((now, lines.describe(now)))
    return said


def test_lines_come_every_few_seconds_then_less_often() -> None:
    said = list_lines(108.3)
    assert said[0] == (2.0, "Compiling programs: 0/28, 2 s (forward 512 x 32)")
    times = [when for when, _ in said]
    assert all(later - earlier >= 5 for earlier, later in pairwise(times))
    assert 6 <= len(said) <= 9 and len(list_lines(3600)) < 20
    assert "/28, 12 s" in said[2][1]


def test_work_that_says_nothing_of_itself_is_still_known_to_go_on() -> None:
    assert ProgressLines("Compiling programs").describe(7.2) == "Compiling programs: 7 s"


@pytest.mark.parametrize(
    ("title", "unit", "total", "line"),
    [
        ("Compiling programs", "", 28, "Compiled 28 programs in 108.3 s"),
        ("Compiling programs", "", 1, "Compiled 1 program in 108.3 s"),
        ("Compiling programs", "", 0, "Compiled programs in 108.3 s"),
        ("Loading weights", "bytes", 16 * 2**30, "Loaded weights of 16.00 GiB in 108.3 s"),
        ("Generating", "requests", 1200, "Generated 1,200 requests in 108.3 s"),
        ("Searching", "prompts", 2, "Searched 2 prompts in 108.3 s"),
        ("Answering", "lines", 2, "Answered 2 lines in 108.3 s"),
    ],
)
def test_the_end_is_in_the_past_tense(title: str, unit: str, total: int, line: str) -> None:
    lines = ProgressLines(title, unit)
    if total:
        lines.report(total, total)
    assert lines.conclude(108.3) == line


@pytest.mark.parametrize(
    ("total", "loaded", "line"),
    [
        (29, 29, "Loaded 29 programs from the cache in 8.0 s"),
        (1, 1, "Loaded 1 program from the cache in 8.0 s"),
        (29, 28, "Compiled 1 program and loaded 28 programs from the cache in 8.0 s"),
        (29, 0, "Compiled 29 programs in 8.0 s"),
    ],
)
def test_what_was_loaded_is_not_said_to_be_compiled(total: int, loaded: int, line: str) -> None:
    lines = ProgressLines("Compiling programs")
    lines.report(total, total, "decode 2", loaded=loaded)
    assert lines.conclude(8.0) == line


def test_bytes_are_shown_in_units_that_people_read() -> None:
    assert format_amount(3 * 2**29, 15 * 2**30, "bytes") == "1.50/15.00 GiB"
    assert format_amount(1, 900, "bytes") == "1/900 bytes"


def test_a_thread_speaks_while_the_work_says_nothing() -> None:
    said: list[str] = []
    lines = ProgressLines("Compiling programs")
    lines.next_line = 0.0
    with say_progress(lines, said.append):
        while not said:
            pass
    assert said[0] == "Compiling programs: 0 s" and said[-1].startswith("Compiled programs in ")


def test_what_fails_is_not_said_to_be_done() -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), say_progress(ProgressLines("Compiling programs"), said.append):
        raise ZeroDivisionError
    assert said == []


@pytest.mark.parametrize(("seconds", "shown"), [(1.9, ""), (108.3, "Compiled 28 programs in 108.3 s\n")])
def test_off_a_terminal_only_long_work_is_worth_a_line(
    seconds: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with show_progress("Compiling programs") as report:
        report(28, 28)
        now = seconds
    assert stream.getvalue() == shown


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with choose_progress(False)("Compiling programs") as report:
        report(28, 28)
        now = 60.0
    stream.close()
    with choose_progress(True)("Compiling programs") as report:
        now = 120.0
    assert stream.closed
