"""The report of a benchmark: one JSON document for all of them, and the flags that say where it goes."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from jaxserve.errors import ConfigError

FORMAT = 1
_NO_SETTINGS = {"run", "argv", "served"}  # of a command's flags; `model` has what `served` says


@dataclass(frozen=True)
class Spread:
    """A figure of several runs. One run is no figure, and says so."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of one value a run, of which there is at least one."""
        return cls(tuple(map(float, values)))

    @property
    def median(self) -> float:
        return median(self.values)

    def asdict(self) -> dict[str, Any]:
        """Returns the form that it has in reports."""
        values = list(self.values)
        return {"median": self.median, "least": min(values), "most": max(values), "values": values}

    def show(self, form: str = ",.0f", scale: float = 1.0) -> str:
        """Returns the median and the range for people, multiplied by `scale`."""
        shown, low, high = (f"{scale * value:{form}}" for value in (self.median, min(self.values), max(self.values)))
        if len(self.values) == 1:
            return f"{shown} (one run, no figure of its own)"
        return f"{shown} ({low} to {high})"

    def __str__(self) -> str:
        return self.show()


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        benchmark: the subcommand.
        settings: all flags, by name.
        environment: `describe_environment()`.
        figures: by name; the values are JSON's, or `Spread`s and tuples at any depth. SI units and tokens.
        command: what was run.
        failures: one line for each thing that went wrong and did not end the run.
    """

    benchmark: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    figures: dict[str, Any]
    command: str = ""
    failures: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Returns the JSON document that `read_schema` describes."""
        return {
            "benchmark": self.benchmark,
            "format": FORMAT,
            "command": self.command,
            "settings": _to_json(self.settings),
            "environment": _to_json(self.environment),
            "figures": _to_json(self.figures),
            "failures": list(self.failures),
        }

    def save(self, paths: Sequence[Path]) -> None:
        """Writes the document to each file.

        Raises:
            ConfigError: a file cannot be written.
        """
        text = json.dumps(self.to_document(), indent=1) + "\n"
        for path in paths:
            write_text(path, text, "output_json")


def _to_json(value: Any) -> Any:
    if isinstance(value, Spread):
        return value.asdict()
    if isinstance(value, dict):
        return {str(name): _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    is_text = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_text else value  # JSON has no infinity


@cache
def read_schema() -> dict[str, Any]:
    """Returns the JSON schema of all reports."""
    found: dict[str, Any] = json.loads(files("jaxserve.tools.bench").joinpath("report_schema.json").read_text())
    return found


def list_settings(args: argparse.Namespace, secret: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the flags of a command by name, those that were left alone included if they have a default.

    Args:
        secret: names of flags whose values are nobody's business; the report says only that they were given.
    """
    found = {name: value for name, value in vars(args).items() if name not in _NO_SETTINGS and value is not None}
    return {name: "given" if name in secret else value for name, value in found.items()}


def show_command(args: argparse.Namespace, secret: Sequence[str] = ()) -> str:
    """Returns the command line, without the values of flags named in `secret`."""
    words, hides = ["jaxserve"], False
    flags = {f"--{name.replace('_', '-')}" for name in secret}
    for word in args.argv:
        name, equals, _ = word.partition("=")
        words.append("..." if hides else f"{name}=..." if equals and name in flags else word)
        hides = word in flags
    return shlex.join(words)


def make_report(
    args: argparse.Namespace,
    benchmark: str,
    environment: dict[str, Any],
    figures: dict[str, Any],
    *,
    failures: Sequence[str] = (),
    secret: Sequence[str] = (),
) -> Report:
    """Returns the report of a command that was run with `args`."""
    settings, command = list_settings(args, secret), show_command(args, secret)
    return Report(benchmark, settings, environment, figures, command, tuple(failures))


def add_report_flags(command: argparse.ArgumentParser) -> Any:
    """Adds the flags that say where the report goes; returns their group."""
    group = command.add_argument_group("report")
    group.add_argument("--save-result", action="store_true", help="write the report to a new file in --result-dir")
    group.add_argument("--result-dir", metavar="DIR", help="an existing folder (default: the working directory)")
    group.add_argument("--result-filename", metavar="NAME", help="in place of a name made of benchmark, model and time")
    group.add_argument("--output-json", metavar="FILE", help="write the report there")
    return group


def read_report_paths(args: argparse.Namespace, benchmark: str) -> list[Path]:
    """Returns the files that the report goes to. Called before the run, so that a bad path costs no measurement.

    Raises:
        ConfigError: a folder is missing, or --save-result is.
    """
    paths = []
    if args.save_result:
        name = args.result_filename
        if name is None:
            model = re.sub(r"[^\w.-]+", "-", str(getattr(args, "model", None) or "demo")).strip("-")
            name = f"{benchmark}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json"
        paths.append(check_target(str(Path(args.result_dir or ".", name)), "result_dir"))
    else:
        for flag in ("result_dir", "result_filename"):
            if (value := getattr(args, flag)) is not None:
                raise ConfigError("says where --save-result writes; give that, too", field=flag, value=value)
    if args.output_json is not None:
        paths.append(check_target(args.output_json, "output_json"))
    return paths


def check_target(name: str, flag: str) -> Path:
    """Returns the path of a file that will be written.

    Raises:
        ConfigError: its folder does not exist, or it is a folder.
    """
    path = Path(name)
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder", field=flag, value=name)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file", field=flag, value=name)
    return path


def write_text(path: Path, text: str, flag: str) -> None:
    """Writes a file; ConfigError names the flag if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field=flag, value=str(path)) from error
