"""`jaxserve simulate` and `jaxserve tune-buckets`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.device_kinds import KNOWN
from jaxserve.errors import ConfigError
from jaxserve.tools.cli.flags import add_command_options, read_engine_options

if TYPE_CHECKING:
    from jaxserve.tools.simulation.study import Study

_ROUTERS = ("prefix", "least-loaded", "round-robin")


def add_simulate_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `jaxserve simulate` to its parser."""
    group = _add_trace_flags(command)
    group.add_argument("--replicas", type=int, default=1, metavar="INT", help="engines behind a router (default: 1)")
    group.add_argument(
        "--router", choices=_ROUTERS, default="prefix", help="which replica gets a request (default: prefix)"
    )
    group.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="a request's first token must come within this")
    group.add_argument(
        "--slo-tpot-ms", type=float, metavar="MS", help="its further tokens within this each, on average"
    )
    group.add_argument(
        "--slo-share",
        type=float,
        default=0.99,
        metavar="SHARE",
        help="of requests that must meet both, for the devices needed (default: 0.99)",
    )
    group.add_argument(
        "--sweep",
        metavar="OPTION=A,B,C",
        help="one run for each value of an option of the engine, or of replicas, router, rate_scale",
    )
    group.add_argument("--json", metavar="FILE", help="write the figures there; -: print them in place of the table")
    group.add_argument("--html", metavar="FILE", help="write a page of plots there")
    add_command_options(command, (EngineConfig,))


def add_tune_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `jaxserve tune-buckets` to its parser."""
    group = _add_trace_flags(command)
    group.add_argument(
        "--max-programs", type=int, metavar="INT", help="compiled forward and sample programs (default: the platform's)"
    )
    add_command_options(command, (EngineConfig,))


def _add_trace_flags(command: argparse.ArgumentParser) -> Any:
    group = command.add_argument_group("simulation")
    group.add_argument(
        "--trace",
        required=True,
        metavar="TRACE",
        help="azure-chat, azure-code or mooncake, which the package has; or a file: Azure's CSV, Mooncake's JSON "
        "lines, the server's log in JSON, or answers of run-batch",
    )
    group.add_argument("--device", metavar="KIND", help=f"{KNOWN} (default: that of the calibration, on CPU)")
    group.add_argument(
        "--calibration", metavar="FILE", help="figures measured by jaxserve bench sweep --calibrate FILE"
    )
    group.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="requests arrive X times as fast (default: 1)"
    )
    group.add_argument("--max-requests", type=int, metavar="INT", help="only the first of the trace")
    return group


def make_study(args: argparse.Namespace) -> Study:
    """Returns what the flags describe; ConfigError names a bad one."""
    from jaxserve.tools.simulation.calibration import read_calibration
    from jaxserve.tools.simulation.study import Study
    from jaxserve.tools.simulation.traces import read_trace

    options = read_engine_options(args)
    if args.max_requests is not None and args.max_requests < 1:
        raise ConfigError(f"must be at least 1, got {args.max_requests}", field="max_requests", value=args.max_requests)
    return Study(
        trace=read_trace(args.trace)[: args.max_requests],
        options=options,
        device=args.device,
        calibration=None if args.calibration is None else read_calibration(args.calibration),
        rate_scale=args.rate_scale,
    )


def simulate(args: argparse.Namespace) -> None:
    """`jaxserve simulate`."""
    from dataclasses import replace

    from rich.console import Console

    from jaxserve.engine.progress import choose_progress
    from jaxserve.tools.simulation.plot import draw_page
    from jaxserve.tools.simulation.report import Targets, make_sweep_table, make_table
    from jaxserve.tools.simulation.study import sweep

    for field, limit in (("slo_ttft_ms", args.slo_ttft_ms), ("slo_tpot_ms", args.slo_tpot_ms)):
        if limit is not None and not limit > 0:
            raise ConfigError(f"must be above 0, got {limit:g}", field=field, value=limit)
    for field, name in (("json", args.json), ("html", args.html)):  # known before the run
        if name not in (None, "-") and not (folder := Path(name).parent).is_dir():
            raise ConfigError(f"{folder} is not a folder", field=field, value=name)
    targets = Targets(args.slo_ttft_ms, args.slo_tpot_ms)
    study = replace(
        make_study(args),
        num_replicas=args.replicas,
        router=args.router,
        targets=targets,
        slo_share=args.slo_share,
    )
    studies = [study] if args.sweep is None else sweep(study, args.sweep)
    plans = [each.plan() for each in studies]  # a bad option shows before the first run
    progress = choose_progress(sys.stderr.isatty() or args.json != "-")
    runs = [each.run(progress) for each in studies]
    title = f"{args.model or 'demo'} on {args.device or 'this CPU'}, {Path(args.trace).name}"
    _, calibration, _ = plans[0]
    summaries = [summary for summary, _ in runs]
    document = {"title": title, "device": calibration.describe(), "runs": [each.to_dict() for each in summaries]}
    if args.json == "-":
        print(json.dumps(document, indent=1))
    else:
        console = Console(highlight=False)
        is_sweep = args.sweep is not None
        console.print(make_sweep_table(summaries, title) if is_sweep else make_table(summaries[0], title))
        console.print(calibration.describe())
    if args.json not in (None, "-"):
        _write(args.json, json.dumps(document, indent=1) + "\n", "json")
    if args.html is not None:
        _write(args.html, draw_page(runs, targets, title, [calibration.describe()]), "html")


def _write(name: str, text: str, field: str) -> None:
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror}", field=field, value=name) from error


def tune_buckets(args: argparse.Namespace) -> None:
    """`jaxserve tune-buckets`."""
    from jaxserve.engine.progress import choose_progress
    from jaxserve.tools.simulation.tuning import to_toml

    tuning, before = make_study(args).tune_buckets(args.max_programs, choose_progress(True))
    print(to_toml(tuning, before), end="")
