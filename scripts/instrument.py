"""What the instruments in this folder have in common: flags, sizes of a dry run, tables and the report.

An instrument is a script that developers measure with. Its report is that of `jaxserve bench`, under the script's name.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.report import Report, add_report_flags, list_settings, read_report_paths
from jaxserve.bench.setup import fill_dry_run
from jaxserve.cli.bench_common import make_table
from jaxserve.errors import ConfigError

_LOG_WIDTH = 160


@dataclass(frozen=True)
class Instrument:
    """One run of an instrument: its flags, and where its figures go."""

    name: str
    args: argparse.Namespace
    paths: tuple[Path, ...]

    @cached_property
    def console(self) -> Console:
        """Where tables go. A log has no width, so its tables keep their words whole."""
        console = Console(highlight=False)
        return console if console.is_terminal else Console(highlight=False, width=_LOG_WIDTH)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Facts about the machine at the first call, which starts JAX."""
        return describe_environment()

    def show(
        self,
        title: str,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        notes: Sequence[str] = (),
        *,
        left: Collection[int] = (0,),
    ) -> None:
        """Prints a table, whose columns in `left` are names, and notes below it."""
        device = f"{self.environment['device']}, {self.environment['cpu']}, jax {self.environment['jax']}"
        self.console.print(make_table(title, header, rows, left=left, caption=device))
        for note in notes:
            self.console.print(note)

    def save(self, figures: dict[str, Any]) -> None:
        """Writes the report, if the flags ask for one; again after each part, so that a run cut off keeps its parts."""
        command = shlex.join(["python", f"scripts/{self.name}.py", *sys.argv[1:]])
        Report(self.name, list_settings(self.args), self.environment, figures, command).save(self.paths)


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Returns the parser of an instrument, whose module has this docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def read_run(parser: argparse.ArgumentParser, sizes: Mapping[str, Any]) -> Instrument:
    """Adds the flags that all instruments have, and reads the command line; exits if it is wrong.

    Args:
        sizes: flags of a dry run, where the user left the defaults.
    """
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in place of the defaults: does it run?")
    add_report_flags(parser)
    name, args = Path(sys.argv[0]).stem, parser.parse_args()
    try:
        paths = tuple(read_report_paths(args, name))
    except ConfigError as error:
        parser.error(str(error))
    return Instrument(name, fill_dry_run(args, parser, sizes), paths)
