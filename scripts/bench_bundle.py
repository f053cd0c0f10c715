"""Compares starts: with an empty compile cache, with a full one, and from a bundle.

Each start is a process of its own, timed from its first line to an engine that is ready, and followed by one seeded
answer, whose tokens must be the same. The bundle is built first, for this machine's devices.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

_CHILD = """
import json, sys, time
start = time.perf_counter()
import jax
compiled = []
hits = []
def hear_end(event, seconds, **facts):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(seconds)
def hear(event, **facts):
    if event == "/jax/compilation_cache/cache_hits":
        hits.append(event)
jax.monitoring.register_event_duration_secs_listener(hear_end)
jax.monitoring.register_event_listener(hear)
from jaxserve import LLM, SamplingParams
llm = LLM(**json.loads(sys.argv[1]), compile="all", show_progress=False)
ready = time.perf_counter() - start
counts = len(compiled) - len(hits), len(hits)
params = SamplingParams(temperature=0.8, seed=3, max_tokens=32, ignore_eos=True)
output = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0]
print(json.dumps([ready, *counts, list(output.outputs[0].token_ids)]))
"""


@dataclass(frozen=True)
class Start:
    """One start of an engine."""

    seconds: float  # until it was ready
    num_compiled: int
    num_cached: int  # programs from the compile cache
    tokens: list[int]


def start_engine(options: dict[str, Any]) -> Start:
    """Starts an engine in a process of its own."""
    command = [sys.executable, "-c", _CHILD, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return Start(*json.loads(done.stdout.splitlines()[-1]))


def build_bundle(options: dict[str, Any], folder: Path) -> float:
    """Builds a bundle by the command; returns the seconds it took."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    begun = time.perf_counter()
    command = [sys.executable, "-m", "jaxserve", "build", *flags, "-o", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def compare(options: dict[str, Any], repeats: int, folder: Path) -> dict[str, list[Start]]:
    """Returns the starts of each kind; the two that are compared take turns."""
    cached = {"compilation_cache_dir": str(folder / "cache")}
    bundled = {"bundle": str(folder / "bundle"), "compilation_cache_dir": str(folder / "unused")}
    starts = {"empty compile cache": [start_engine(options | cached)], "full compile cache": [], "bundle": []}
    for _ in range(repeats):
        starts["full compile cache"].append(start_engine(options | cached))
        starts["bundle"].append(start_engine(options | bundled))
    return starts


def print_starts(starts: dict[str, list[Start]], built: float, size: int) -> None:
    table = Table(title="From the process's start to an engine that is ready")
    for column in ("start", "seconds", "of the full cache", "compiled", "from the cache"):
        table.add_column(column, justify="left" if column == "start" else "right")
    cached = median(start.seconds for start in starts["full compile cache"])
    for name, found in starts.items():
        seconds, last = median(start.seconds for start in found), found[-1]
        row = name, f"{seconds:.2f}", f"{seconds / cached:.2f}", str(last.num_compiled), str(last.num_cached)
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"The bundle took {built:.1f} s to build and has {size / 2**20:.1f} MiB.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--options", default="{}", metavar="JSON", help="further options of the engine")
    args = parser.parse_args()
    options = {"model": args.model, **json.loads(args.options)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        built = build_bundle(options, folder / "bundle")
        size = sum(path.stat().st_size for path in (folder / "bundle").iterdir())
        starts = compare(options, args.repeats, folder)
    print_starts(starts, built, size)
    tokens = [start.tokens for found in starts.values() for start in found]
    if any(each != tokens[0] for each in tokens):
        print("the starts do not give the same tokens", file=sys.stderr)
        return 1
    if starts["bundle"][-1].num_compiled:
        print("a start with the bundle compiled something", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
