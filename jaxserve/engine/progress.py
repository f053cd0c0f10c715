"""Progress bars on standard error, for whatever may take longer than two seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    def __call__(self, done: float, total: float, note: str = "") -> None:
        """Says how far the work is."""


@contextmanager
def show_progress(title: str, *, enabled: bool = True, unit: str = "") -> Iterator[Report]:
    """Yields a function that moves a bar; without a terminal, or when not enabled, nothing is printed."""
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
    with Progress(*columns, console=console, disable=not (enabled and console.is_terminal)) as bars:
        task = bars.add_task(title, total=1, note="")

        def report(done: float, total: float, note: str = "") -> None:
            bars.update(task, completed=done, total=total, note=note)

        yield report
