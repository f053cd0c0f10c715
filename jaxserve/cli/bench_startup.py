"""`jaxserve bench startup`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.report import add_report_flags, make_report, read_report_paths
from jaxserve.bench.setup import add_iteration_flags, check_counts, fill_dry_run
from jaxserve.cli.bench_common import DRY_ENGINE, add_benchmark, finish
from jaxserve.cli.flags import add_command_options, read_engine_options
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

_MORE_KINDS = ("warm", "bundle")
_DRY = {"num_iters": 1, "starts": ["warm"]}


def add_startup(group: Any) -> None:
    """Adds `bench startup`."""
    text = "time starts of an engine: with an empty compile cache, with a full one, and from a bundle"
    command = add_benchmark(group, "startup", _run, text)
    runs = add_iteration_flags(command, num_iters=3)
    text = f"kinds besides cold ones (default: {' '.join(_MORE_KINDS)})"
    runs.add_argument("--starts", nargs="*", choices=_MORE_KINDS, default=list(_MORE_KINDS), metavar="KIND", help=text)
    add_report_flags(command)
    add_command_options(command, (EngineConfig,))


def _run(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxserve.bench.startup import (
        KINDS,
        build_bundle,
        list_faults,
        make_startup_table,
        measure_starts,
        summarize_starts,
    )
    from jaxserve.engine.progress import show_progress

    args = fill_dry_run(args, command, _DRY)
    check_counts(args, num_iters=1)
    paths = read_report_paths(args, "startup")
    given = read_engine_options(args)
    for name in ("bundle", "compilation_cache_dir"):
        if name in given:
            raise ConfigError("each start gets one of its own; leave it out", field=name, value=given[name])
    kinds = [kind for kind in KINDS if kind == "cold" or kind in args.starts]
    is_quick = args.dry_run and "bundle" not in kinds  # a bundle has all programs
    options = {"compile": "used" if is_quick else "all"} | (DRY_ENGINE if args.dry_run else {}) | given
    config = EngineConfig.from_options(**options)  # a bad option shows before the first process
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build = None
        if "bundle" in kinds:
            with show_progress("Compiling a bundle"):
                build = build_bundle(options, folder)
        with show_progress("Measuring", unit="starts") as report:
            starts = measure_starts(options, kinds, folder, args.num_iters, report)
    figures = summarize_starts(starts, build)
    console = Console(highlight=False)
    console.print(make_startup_table(figures, config.model.model))
    console.print(", ".join(f"{kind}: {KINDS[kind]}" for kind in kinds) + ".")
    if build is not None:
        console.print(f"The bundle took {build.seconds:.1f} s to build and has {build.size_bytes / 2**20:.1f} MiB.")
    failures = list_faults(starts, makes_weights=config.model.load_format == "dummy")
    return finish(make_report(args, "startup", describe_environment(), figures, failures=failures), paths)
