"""The context that a stage runs in, and the items that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device_stages.clocks import ClockLog
from device_stages.results import Line, results_of


class NotHereError(Exception):
    """Something that an item needs is not on this machine; the message names it."""


@dataclass(frozen=True)
class Item:
    """One measurement or check. `run` returns the figures of its line, which may have "ok", by default true."""

    name: str
    run: Callable[[], Line]
    predicted: str = ""  # what was expected, beside what is found


def describe_fault(errors: str) -> str:
    """Returns the last line of a program's standard error, which usually says what was wrong."""
    lines = errors.strip().splitlines()
    return lines[-1] if lines else "no words"


@dataclass(frozen=True)
class Context:
    """The context of a stage."""

    stage: str
    out: Path  # the folder of the results
    impl: str | None = None  # attention implementation; None: the device's choice
    tiny: bool = False  # small shapes, to test the stage
    careful: bool = False  # an earlier process of this stage died: prepare no item before it is begun
    seconds: float = 600.0  # after which no item is begun
    skip: tuple[str, ...] = ()  # items not to run
    lines: tuple[Line, ...] = ()  # the day's lines so far
    clocks: ClockLog = field(default_factory=ClockLog)

    def find(self, stage: str, item: str) -> dict[str, Any]:
        """Returns the figures of an item of an earlier stage; empty if it has none."""
        return next((line for line in results_of(self.lines, stage) if line["item"] == item), {})
