"""Flags and steps that the benchmarks of the command line share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxserve.tools.bench.plots import (
    PageTable,
    check_plot_target,
    list_facts,
    require_matplotlib,
    save_figure,
    write_page,
)
from jaxserve.tools.bench.report import Report, check_target, show_command
from jaxserve.tools.cli.flags import add_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from jaxserve.tools.bench.setup import Bench


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


def add_plot_flags(group: Any) -> None:
    """Adds the flags of plots and pages."""
    group.add_argument("--plot", metavar="FILE", help="draw the curve as a .png or .svg")
    group.add_argument("--html", metavar="FILE", help="write a page of its own with plots and tables")


def check_plot_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError about a plot or page that could not be written."""
    if args.plot is not None:
        check_plot_target(args.plot)
    if args.html is not None:
        check_target(args.html, "html")
        require_matplotlib("html")


def save_pictures(
    args: argparse.Namespace,
    title: str,
    tables: Sequence[PageTable],
    draw: Callable[[], Sequence[Figure]],
    *,
    notes: Sequence[str],
    environment: Mapping[str, Any],
    secret: Sequence[str] = (),
) -> None:
    """Writes what --plot and --html ask for: the first figure, and a page of all figures, the tables and the notes.

    Args:
        draw: is called only if something was asked for.
        secret: flags whose values the page does not show.
    """
    if args.plot is None and args.html is None:
        return
    figures = draw()
    if args.plot is not None:
        save_figure(figures[0], Path(args.plot))
        print(f"The plot is in {args.plot}.")
    if args.html is not None:
        facts = list_facts(show_command(args, secret), environment)
        write_page(Path(args.html), title, [*tables, facts], figures, notes)
        print(f"The page is in {args.html}.")


def add_defaults(
    args: argparse.Namespace, given: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the engine's options with those of a benchmark where the user gave none.

    All programs are compiled before the clock runs; in a dry run those that the warm-up needs.
    """
    return {"compile": "used" if args.dry_run else "all"} | dict(defaults) | dict(given)
