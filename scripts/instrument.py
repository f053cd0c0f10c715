"""The frame of the instruments in this folder: flags, sizes of a dry run, tables and the report.

An instrument is a script that developers measure with. Its report is that of `jaxserve bench`, under the script's name.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.config import EngineConfig
from jaxserve.errors import JaxServeError
from jaxserve.tools.bench.environment import describe_environment
from jaxserve.tools.bench.report import Report, add_report_flags, list_settings, read_report_paths
from jaxserve.tools.bench.setup import fill_dry_run
from jaxserve.tools.cli.bench_common import make_table
from jaxserve.tools.cli.flags import add_command_options

_LOG_WIDTH = 160


@dataclass(frozen=True)
class Instrument:
    """One run of an instrument: its flags, and where its figures go.

    Attributes:
        has_devices: this process may take the devices; else only those that it starts do.
    """

    name: str
    args: argparse.Namespace
    paths: tuple[Path, ...]
    has_devices: bool = True

    @cached_property
    def console(self) -> Console:
        """Where tables go. A log has no width, so its tables keep their words whole."""
        console = Console(highlight=False)
        return console if console.is_terminal else Console(highlight=False, width=_LOG_WIDTH)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Facts about the machine at the first call, which starts JAX if the process has devices."""
        return describe_environment(has_devices=self.has_devices)

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
        facts = self.environment["device"], self.environment["cpu"], f"jax {self.environment['jax']}"
        self.console.print(make_table(title, header, rows, left=left, caption=", ".join(filter(None, facts))))
        for note in notes:
            self.console.print(note, markup=False, soft_wrap=True)

    def save(self, figures: dict[str, Any], failures: Sequence[str] = ()) -> None:
        """Writes the report, if the flags ask for one; again after each part, so that a run cut off keeps its parts."""
        command = shlex.join(["python", f"scripts/{self.name}.py", *sys.argv[1:]])
        settings = list_settings(self.args)
        Report(self.name, settings, self.environment, figures, command, tuple(failures)).save(self.paths)

    def finish(self, figures: dict[str, Any], failures: Sequence[str]) -> int:
        """Writes the report and prints what failed; returns the exit status, 1 if something did."""
        self.save(figures, failures)
        for failure in failures:
            print(f"{self.name}: {failure}", file=sys.stderr)
        return 1 if failures else 0


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Returns the parser of an instrument, whose module has this docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the model and all options of an engine, which `jaxserve.tools.cli.flags.read_engine_options` reads."""
    parser.usage = f"{parser.prog} [MODEL] [options]"  # argparse would list every flag above each error
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    add_command_options(parser, (EngineConfig,))


@contextmanager
def explain_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the script with one line about an error that a user can fix."""
    try:
        yield
    except JaxServeError as error:
        parser.error(str(error))


def read_run(parser: argparse.ArgumentParser, sizes: Mapping[str, Any], *, has_devices: bool = True) -> Instrument:
    """Adds the flags that all instruments have, and reads the command line; exits if it is wrong.

    Args:
        sizes: flags of a dry run, where the user left the defaults.
        has_devices: see `Instrument`.
    """
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in place of the defaults: does it run?")
    add_report_flags(parser)
    name, args = Path(sys.argv[0]).stem, parser.parse_args()
    with explain_errors(parser):
        paths = tuple(read_report_paths(args, name))
    return Instrument(name, fill_dry_run(args, parser, sizes), paths, has_devices)
