"""Starts of an engine: cold, warm and from a bundle, each a process of its own, in turns.

A cold start has an empty compile cache, a warm one that of the first cold one, and one from a bundle the programs of
`jaxserve build`. All must give the same tokens, and the last two may compile nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instrument import Instrument, add_engine_flags, explain_errors, make_parser, read_run

from jaxserve.config import EngineConfig
from jaxserve.engine.progress import show_progress
from jaxserve.errors import ConfigError, JaxServeError
from jaxserve.tools.bench.report import Spread
from jaxserve.tools.bench.setup import check_counts
from jaxserve.tools.cli.bench_common import DRY_ENGINE, add_defaults
from jaxserve.tools.cli.flags import read_engine_options

CHILD = Path(__file__).with_name("start_engine.py")
KINDS = {
    "cold": "an empty compile cache",
    "warm": "a full compile cache",
    "bundle": "the programs of jaxserve build",
}
_MORE_KINDS = ("warm", "bundle")
_HEADER = ("start", "seconds", "of cold", "CPU seconds", "first answer", "compiled", "from the cache")


class StartError(JaxServeError, RuntimeError):
    """A process that was to start an engine or build a bundle failed; the message has its last line."""


@dataclass(frozen=True)
class Start:
    """One start of an engine. Seconds count from the process's first line of Python."""

    seconds: float  # until it was ready
    cpu_seconds: float  # until then, of all threads
    answer_seconds: float  # until it had answered once
    num_compiled: int
    num_cached: int  # programs from the compile cache
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Build:
    """The build of a bundle."""

    seconds: float
    size_bytes: int


def run_child(task: Mapping[str, Any]) -> dict[str, Any]:
    """Runs `start_engine.py` on a task and returns its figures.

    Raises:
        StartError: the process failed.
    """
    command = [sys.executable, str(CHILD), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise StartError(f"a start failed: {lines[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def build_bundle(options: Mapping[str, Any], folder: Path) -> Build:
    """Builds the bundle that the starts take, without a compile cache."""
    return Build(**run_child({"options": dict(options), "bundle": str(folder / "bundle")}))


def measure_starts(
    options: Mapping[str, Any], kinds: Sequence[str], folder: Path, num_iters: int, note: Callable[[int, int], None]
) -> dict[str, list[Start]]:
    """Returns the starts of each kind, which take turns. `folder` has the bundle, if that is wanted, and gets caches.

    A warm start needs a cold one before it.
    """
    found: dict[str, list[Start]] = {kind: [] for kind in kinds}
    for turn in range(num_iters):
        places = {
            "cold": {"compilation_cache_dir": str(folder / f"cache-{turn}")},
            "warm": {"compilation_cache_dir": str(folder / "cache-0")},
            "bundle": {"compilation_cache_dir": str(folder / "unused"), "bundle": str(folder / "bundle")},
        }
        for place, kind in enumerate(kinds):
            note(len(kinds) * turn + place, len(kinds) * num_iters)
            start = run_child({"options": {**options, **places[kind]}})
            found[kind].append(Start(**start | {"tokens": tuple(start["tokens"])}))
    note(len(kinds) * num_iters, len(kinds) * num_iters)
    return found


def summarize_starts(starts: Mapping[str, Sequence[Start]], build: Build | None) -> dict[str, Any]:
    """Returns the figures of a report."""
    kinds = {
        kind: {
            "seconds": Spread.of([start.seconds for start in found]),
            "cpu_seconds": Spread.of([start.cpu_seconds for start in found]),
            "answer_seconds": Spread.of([start.answer_seconds for start in found]),
            "num_compiled": found[-1].num_compiled,
            "num_cached": found[-1].num_cached,
        }
        for kind, found in starts.items()
    }
    built = {} if build is None else {"build_seconds": build.seconds, "bundle_bytes": build.size_bytes}
    return {"starts": kinds, **built}


def list_faults(starts: Mapping[str, Sequence[Start]], *, makes_weights: bool = False) -> list[str]:
    """Returns what starts may not do: answer differently, or compile what they need not.

    Args:
        makes_weights: they are random, made by programs that no bundle has.
    """
    faults = []
    if len({start.tokens for found in starts.values() for start in found}) > 1:
        faults.append("the starts do not give the same tokens")
    faults += [
        f"a start with {KINDS[kind]} compiled {most} programs"
        for kind in (("warm",) if makes_weights else ("warm", "bundle"))
        if (most := max((start.num_compiled for start in starts.get(kind, ())), default=0))
    ]
    return faults


def make_row(kind: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the line of a kind of start in the table."""
    found = figures["starts"][kind]
    return (
        kind,
        found["seconds"].show(".2f"),
        f"{found['seconds'].median / figures['starts']['cold']['seconds'].median:.2f}",
        f"{found['cpu_seconds'].median:.1f}",
        f"{found['answer_seconds'].median:.2f}",
        str(found["num_compiled"]),
        str(found["num_cached"]),
    )


def read_options(args: argparse.Namespace, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the options of the engines that are started; ConfigError about one that would decide the kind."""
    given = read_engine_options(args)
    for name in ("bundle", "compilation_cache_dir"):
        if name in given:
            raise ConfigError("each start gets one of its own; leave it out", field=name, value=given[name])
    defaults = DRY_ENGINE if args.dry_run else {}
    if "bundle" in kinds:  # which has all programs
        defaults = defaults | {"compile": "all"}
    return add_defaults(args, given, defaults)


def measure(options: Mapping[str, Any], kinds: Sequence[str], num_iters: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the figures of a report, and what starts did that they may not."""
    config = EngineConfig.from_options(**options)  # a bad option shows before the first process
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build = None
        if "bundle" in kinds:
            with show_progress("Compiling a bundle"):
                build = build_bundle(options, folder)
        with show_progress("Measuring", unit="starts") as report:
            starts = measure_starts(options, kinds, folder, num_iters, report)
    faults = list_faults(starts, makes_weights=config.model.load_format == "dummy")
    return summarize_starts(starts, build), faults


def show(run: Instrument, model: str, figures: Mapping[str, Any]) -> None:
    """Prints the table."""
    kinds = list(figures["starts"])
    notes = [", ".join(f"{kind}: {KINDS[kind]}" for kind in kinds) + "."]
    if "build_seconds" in figures:
        seconds, size = figures["build_seconds"], figures["bundle_bytes"] / 2**20
        notes.append(f"The bundle took {seconds:.1f} s to build and has {size:.1f} MiB.")
    title = f"{model}: from the process's start to an engine that is ready"
    run.show(title, _HEADER, [make_row(kind, figures) for kind in kinds], notes)


def main() -> int:
    """Measures, prints the table and writes the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--num-iters", type=int, default=3, help="starts of each kind (default: %(default)s)")
    text = f"kinds besides cold ones (default: {' '.join(_MORE_KINDS)})"
    parser.add_argument(
        "--starts", nargs="*", choices=_MORE_KINDS, default=list(_MORE_KINDS), metavar="KIND", help=text
    )
    add_engine_flags(parser)
    run = read_run(parser, {"num_iters": 1, "starts": ["warm"]})
    kinds = [kind for kind in KINDS if kind == "cold" or kind in run.args.starts]
    with explain_errors(parser):
        check_counts(run.args, num_iters=1)
        options = read_options(run.args, kinds)
        figures, faults = measure(options, kinds, run.args.num_iters)
    show(run, options.get("model", "demo"), figures)
    return run.finish(figures, faults)


if __name__ == "__main__":
    sys.exit(main())
