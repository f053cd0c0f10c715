"""Progress of long work: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

_FIRST_LINE = 2.0  # seconds until the first line
_LEAST_GAP = 5.0  # seconds between two lines
_GROWTH = 1.5  # ratio of the times of successive lines: 17 lines for an hour of work
_SCALES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


class Report(Protocol):
    def __call__(self, done: float, total: float, note: str = "", *, loaded: float = 0) -> None:
        """Reports that `done` of `total` units are complete; of these `loaded` came from a cache and were not made."""


class ShowProgress(Protocol):
    def __call__(self, title: str, *, unit: str = "") -> AbstractContextManager[Report]:
        """Shows a piece of work while the context lasts; yields the function that reports its progress.

        Args:
            title: a regular verb in its -ing form, with its object if `unit` does not name it.
            unit: what is counted; "bytes" are shown in larger units.
        """


class ProgressLines:
    """The text lines for one piece of work, and when they are due. Times are seconds since it began."""

    def __init__(self, title: str, unit: str = "") -> None:
        self._title, self._unit = title, unit
        self._done, self._total, self._note, self._loaded = 0.0, 0.0, "", 0.0  # the total is 0 until it is known
        self.next_line = _FIRST_LINE  # when the next line is due

    def report(self, done: float, total: float, note: str = "", *, loaded: float = 0) -> None:
        """Records the progress for the next line."""
        self._done, self._total, self._note, self._loaded = done, total, note, loaded

    def describe(self, seconds: float) -> str:
        """Returns the current line, and schedules the next."""
        self.next_line = max(seconds + _LEAST_GAP, seconds * _GROWTH)
        parts = [format_amount(self._done, self._total, self._unit)] if self._total else []
        return f"{self._title}: {', '.join([*parts, f'{seconds:.0f} s'])}" + (f" ({self._note})" if self._note else "")

    def conclude(self, seconds: float) -> str:
        """Returns the last line: what was done, in the past tense, and how long it took."""
        verb, _, what = self._title.partition(" ")
        if self._unit == "bytes":
            what = f"{what} of {format_amount(self._total, self._total, 'bytes').partition('/')[2]}"
        elif self._total:
            what = self._unit or what
            made, loaded = self._total - self._loaded, _count(self._loaded, what)
            if not self._loaded:
                what = _count(made, what)
            elif not made:
                verb, what = "Loading", f"{loaded} from the cache"
            else:
                what = f"{_count(made, what)} and loaded {loaded} from the cache"
        return f"{verb.removesuffix('ing')}ed {what} in {seconds:.1f} s"


def _count(number: float, what: str) -> str:
    """Returns "1 program" or "1,200 programs"."""
    return f"{number:,.0f} {what.removesuffix('s') if number == 1 else what}"


def format_amount(done: float, total: float, unit: str) -> str:
    """Returns "3/28 requests", or "0.40/14.90 GiB" where bytes are counted."""
    if unit != "bytes":
        return f"{done:,.0f}/{total:,.0f} {unit}".rstrip()
    name, size = next(each for each in _SCALES if total >= each[1] or each[1] == 1)
    digits = 0 if size == 1 else 2
    return f"{done / size:.{digits}f}/{total / size:.{digits}f} {name}"


@contextmanager
def say_progress(lines: ProgressLines, say: Callable[[str], None], *, least_seconds: float = 0) -> Iterator[Report]:
    """Calls `say` with each line that is due, even without reports, and with the last line after success.

    Args:
        say: runs on a thread of its own, except for the last line.
        least_seconds: work shorter than this gets no last line.
    """
    start, ended = time.monotonic(), threading.Event()

    def speak() -> None:
        while not ended.wait(lines.next_line - (time.monotonic() - start)):
            say(lines.describe(time.monotonic() - start))

    speaking = threading.Thread(target=speak, name="jaxserve-progress", daemon=True)
    speaking.start()
    try:
        yield lines.report
    finally:
        ended.set()
        speaking.join()
    if (seconds := time.monotonic() - start) >= least_seconds:
        say(lines.conclude(seconds))


@contextmanager
def show_progress(title: str, *, unit: str = "") -> Iterator[Report]:
    """Shows progress on standard error: a bar on a terminal, else a line from time to time.

    Work of two seconds or more leaves a line with its duration.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        with say_progress(ProgressLines(title, unit), _print, least_seconds=_FIRST_LINE) as report:
            yield report
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    lines, start = ProgressLines(title, unit), time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=None, amount="", note="")

        def move(done: float, total: float, note: str = "", *, loaded: float = 0) -> None:
            lines.report(done, total, note, loaded=loaded)
            bars.update(task, completed=done, total=total, amount=format_amount(done, total, unit), note=note)

        yield move
    if (seconds := time.monotonic() - start) >= _FIRST_LINE:
        _print(lines.conclude(seconds))


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stream must not end the work
        print(line, file=sys.stderr, flush=True)  # not cached: a bar may have replaced sys.stderr


@contextmanager
def hide_progress(title: str, *, unit: str = "") -> Iterator[Report]:
    """Shows nothing."""

    def report(done: float, total: float, note: str = "", *, loaded: float = 0) -> None:
        pass

    yield report


def choose_progress(enabled: bool) -> ShowProgress:
    """Returns `show_progress` if enabled, else `hide_progress`."""
    return show_progress if enabled else hide_progress


def choose_announce(enabled: bool) -> Callable[[str], None]:
    """Returns a function that prints an event as a line on standard error if enabled, else does nothing."""

    def announce(text: str) -> None:
        _print(f"jaxserve: {text}")

    return announce if enabled else lambda text: None
