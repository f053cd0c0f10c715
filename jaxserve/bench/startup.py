"""`jaxserve bench startup`: cold, warm and bundled starts, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.bench.report import Spread
from jaxserve.errors import JaxServeError

if TYPE_CHECKING:
    from rich.table import Table

KINDS = {
    "cold": "an empty compile cache",
    "warm": "a full compile cache",
    "bundle": "the programs of jaxserve build",
}


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
    """Runs `jaxserve.bench.start_child` on a task and returns its figures.

    Raises:
        StartError: the process failed.
    """
    command = [sys.executable, "-m", "jaxserve.bench.start_child", json.dumps(task)]
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


def make_startup_table(figures: Mapping[str, Any], model: str) -> Table:
    """Returns the table that the command prints."""
    from rich.table import Table

    table = Table(title=f"{model}: from the process's start to an engine that is ready")
    for column in ("start", "seconds", "of cold", "CPU seconds", "first answer", "compiled", "from the cache"):
        table.add_column(column, justify="left" if column == "start" else "right")
    cold = figures["starts"]["cold"]["seconds"].median
    for kind, found in figures["starts"].items():
        table.add_row(
            kind,
            found["seconds"].show(".2f"),
            f"{found['seconds'].median / cold:.2f}",
            f"{found['cpu_seconds'].median:.1f}",
            f"{found['answer_seconds'].median:.2f}",
            str(found["num_compiled"]),
            str(found["num_cached"]),
        )
    return table
