"""What the benchmarks of the command line have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxserve.bench.report import Report
from jaxserve.cli.flags import add_command

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.bench.setup import Bench


DRY_ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}  # of dry runs


def add_benchmark(
    group: Any,
    name: str,
    run: Callable[[argparse.ArgumentParser, argparse.Namespace], int | None],
    text: str,
    words: str = "[MODEL]",
) -> argparse.ArgumentParser:
    """Adds one benchmark, whose function also gets its parser."""
    command = add_command(group, name, None, text, words, prefix="bench ")
    command.set_defaults(run=partial(run, command))
    return command


def finish(report: Report, paths: Sequence[Path]) -> int:
    """Saves a report and names its files and failures; returns the exit status, 1 if something failed."""
    report.save(paths)
    for path in paths:
        print(f"The report is in {path}.")
    for failure in report.failures:
        print(f"jaxserve bench: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


def make_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (), caption: str = ""
) -> Table:
    """Returns a table of figures, narrow enough for most terminals.

    Args:
        left: columns of names, by index.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, caption=caption or None, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_result(table: Any, bench: Bench, notes: Sequence[str] = ()) -> None:
    """Prints a table, notes on it, and the rates that it compares with."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(note)
    console.print(f"Limits measured in this run: {bench.limits.describe()}.")


def add_defaults(
    args: argparse.Namespace, given: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the engine's options with those of a benchmark where the user gave none.

    All programs are compiled before the clock runs; in a dry run those that the warm-up needs.
    """
    return {"compile": "used" if args.dry_run else "all"} | dict(defaults) | dict(given)
