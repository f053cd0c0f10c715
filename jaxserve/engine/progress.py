"""Progress bars on standard error, for whatever may take longer than two seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Report(Protocol):
    def __call__(self, done: float, total: float, note: str = "") -> None:
        """Says how far the work is."""


class ShowProgress(Protocol):
    def __call__(self, title: str, *, unit: str = "") -> AbstractContextManager[Report]:
        """Begins a piece of work; the function that it yields says how far it is."""


@contextmanager
def show_progress(title: str, *, unit: str = "") -> Iterator[Report]:
    """Yields a function that moves a bar; without a terminal nothing is printed."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(title, total=1, note="")

        def report(done: float, total: float, note: str = "") -> None:
            bars.update(task, completed=done, total=total, note=note)

        yield report


@contextmanager
def hide_progress(title: str, *, unit: str = "") -> Iterator[Report]:
    """Shows nothing."""

    def report(done: float, total: float, note: str = "") -> None:
        pass

    yield report


def choose_progress(enabled: bool) -> ShowProgress:
    """Returns how progress is shown: bars on a terminal, or nothing at all."""
    return show_progress if enabled else hide_progress
