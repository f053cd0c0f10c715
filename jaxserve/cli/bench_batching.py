"""`jaxserve bench sweep --batching`: ways of batching side by side, by how much answers vary in length."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.bench.batching import WAYS, Served, Workload, measure_cv, serve
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.plots import Line, PageTable, Panel, draw_panels
from jaxserve.bench.report import Spread, make_report
from jaxserve.bench.setup import Bench, check_counts, repeat
from jaxserve.bench.throughput import summarize_times
from jaxserve.cli.bench_common import DRY_ENGINE, add_defaults, finish, make_table, print_result, save_pictures
from jaxserve.cli.flags import read_engine_options
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRY_BATCHING = {
    "length_cv": [0.0, 1.0],
    "num_prompts": 8,
    "input_len": 8,
    "output_len": 6,
    "num_iters": 2,
}
_TIMEOUT = 0.05
_HEADER = ("cv", "way", "seconds", "tokens/s", "useful", "p50, s", "p99, s", "slower by")


def add_batching_flags(command: argparse.ArgumentParser) -> tuple[str, ...]:
    """Adds the flags of this comparison; returns the names of those that need --batching."""
    group = command.add_argument_group("ways of batching, in place of batch sizes")
    text = f"compare these with continuous batching: {', '.join(WAYS)}"
    group.add_argument("--batching", nargs="+", metavar="WAY", help=text)
    numbers: list[tuple[str, Any, Any, str]] = [
        ("--num-prompts", int, 128, "requests"),
        ("--input-len", int, 64, "tokens of a prompt"),
        ("--output-len", int, 48, "tokens of an answer, in the mean"),
        ("--request-rate", float, float("inf"), "requests per second, which arrive at random; inf: all at once"),
        ("--batch-timeout", float, _TIMEOUT, "seconds after which a dynamic batch is closed"),
        ("--num-iters-warmup", int, 1, "runs before the measured ones"),
    ]
    for flag, kind, default, text in numbers:
        metavar = kind.__name__.upper()
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")
    text = "coefficients of variation of answers' lengths, with the same mean (default: 0 0.5 1 2)"
    default_cv = [0.0, 0.5, 1.0, 2.0]
    group.add_argument("--length-cv", type=float, nargs="+", default=default_cv, metavar="CV", help=text)
    return (*(flag.removeprefix("--").replace("-", "_") for flag, *_ in numbers), "length_cv")


def run_batching(args: argparse.Namespace, paths: Sequence[Path]) -> int:
    """Runs the comparison."""
    ways = _check(args)
    workload = Workload(
        args.num_prompts, args.input_len, args.output_len, args.request_rate, getattr(args, "seed", None) or 0
    )
    fitting = {"max_model_len": workload.max_model_len, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    defaults = fitting | (DRY_ENGINE if args.dry_run else {})
    bench = Bench.open(add_defaults(args, read_engine_options(args), defaults))
    shapes, rows, failures = bench.llm.ready.shapes, list[dict[str, Any]](), list[str]()
    for cv in args.length_cv:
        requests = workload.make(cv, shapes.model.vocab_size)
        run = partial(_serve_all, bench, requests, ways, args.batch_timeout)
        turns = repeat(run, num_iters=args.num_iters, num_warmup=args.num_iters_warmup)
        rows += [_summarize(cv, measure_cv(requests), way, turns) for way in ways]
        failures += [failure for turn in turns for served in turn.values() for failure in served.failures]
    figures = {**bench.describe(), "ways": rows}
    _show(args, bench, rows)
    report = make_report(args, "sweep", describe_environment(), figures, failures=list(dict.fromkeys(failures)))
    return finish(report, paths)


def _check(args: argparse.Namespace) -> list[str]:
    """Returns the ways to compare, continuous batching last."""
    for way in args.batching:
        if way not in WAYS:
            raise ConfigError(f"there is no way {way!r}; there are {', '.join(WAYS)}", field="batching", value=way)
    check_counts(args, num_prompts=1, input_len=1, output_len=1, num_iters_warmup=0)
    for field in ("request_rate", "batch_timeout"):
        if not (value := getattr(args, field)) > 0:
            raise ConfigError(f"must be above 0, got {value}", field=field, value=value)
    if args.batch_timeout != _TIMEOUT and "dynamic" not in args.batching:
        message = f"is for --batching dynamic; this is {' '.join(args.batching)}"
        raise ConfigError(message, field="batch_timeout", value=args.batch_timeout)
    if not all(0 <= cv < float("inf") for cv in args.length_cv):
        raise ConfigError(f"must be at least 0, got {args.length_cv}", field="length_cv", value=args.length_cv)
    return [way for way in WAYS if way in args.batching or way == "continuous"]


def _serve_all(bench: Bench, requests: Sequence[Any], ways: Sequence[str], timeout: float) -> dict[str, Served]:
    rows = bench.llm.ready.shapes.limits.max_num_seqs
    return {way: serve(bench.llm, requests, way, rows=rows, timeout=timeout) for way in ways}


def _summarize(cv: float, measured_cv: float, way: str, turns: Sequence[Mapping[str, Served]]) -> dict[str, Any]:
    found = [turn[way] for turn in turns]
    return {
        "length_cv": cv,
        "measured_cv": measured_cv,
        "way": way,
        "seconds": Spread.of([each.seconds for each in found]),
        "tokens_per_second": Spread.of([each.rate for each in found]),
        "useful_share": found[-1].useful_share,
        "latency": summarize_times([latency for each in found for latency in each.latencies]),
        "slower_by": Spread.of([turn["continuous"].rate / turn[way].rate for turn in turns]),
    }


def _make_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['length_cv']:g}",
        row["way"],
        f"{row['seconds'].median:.2f}",
        f"{row['tokens_per_second'].median:,.0f}",
        f"{row['useful_share']:.0%}",
        f"{row['latency']['p50']:.2f}",
        f"{row['latency']['p99']:.2f}",
        "" if row["way"] == "continuous" else row["slower_by"].show(".1f"),
    )


def _show(args: argparse.Namespace, bench: Bench, rows: Sequence[Mapping[str, Any]]) -> None:
    count = bench.llm.ready.shapes.limits.max_num_seqs
    title = f"Ways of batching, {args.num_prompts} requests, {count} rows: {bench.title}"
    shown = [_make_row(row) for row in rows]
    notes = _list_notes(rows, arrives=args.request_rate < float("inf"))
    print_result(make_table(title, _HEADER, shown, left=(1,)), bench, notes)
    save_pictures(
        args,
        title,
        [PageTable("Ways of batching", _HEADER, shown)],
        partial(_draw, bench, rows, arrives=args.request_rate < float("inf")),
        notes=[*notes, f"Limits measured in this run: {bench.limits.describe()}."],
        environment=describe_environment(),
    )


def _list_notes(rows: Sequence[Mapping[str, Any]], *, arrives: bool) -> list[str]:
    """Returns, for each other way, by how much continuous batching is faster at the least and most variance.

    Args:
        arrives: requests arrive one after the other, so that latencies tell more than tokens/s.
    """
    notes = ["p50 and p99 are of the latency of a request, from its arrival to its last token."]
    if arrives:
        notes.append("No way can make more tokens/s than arrive, so latencies tell more here.")
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] != "continuous"):
        found = sorted((row["slower_by"].median, row["length_cv"]) for row in rows if row["way"] == way)
        (least, at_least), (most, at_most) = found[0], found[-1]
        notes.append(
            f"Continuous batching makes {least:.1f}x (cv {at_least:g}) to {most:.1f}x (cv {at_most:g}) of the tokens/s "
            f"of {way}."
        )
    return notes


def _draw(bench: Bench, rows: Sequence[Mapping[str, Any]], *, arrives: bool) -> list[Figure]:
    """Returns the plots of tokens/s and of latencies, what tells more first."""
    ways = list(dict.fromkeys(row["way"] for row in rows))

    def make_panel(y_label: str, value: Callable[[Mapping[str, Any]], float]) -> Panel:
        lines = []
        for way in ways:
            found = [row for row in rows if row["way"] == way]
            lines.append(Line(way, [row["length_cv"] for row in found], [value(row) for row in found]))
        return Panel("variation of answers' lengths (cv)", y_label, lines)

    speeds = (
        make_panel("tokens/s", lambda row: row["tokens_per_second"].median),
        make_panel("times slower than continuous", lambda row: row["slower_by"].median),
    )
    latencies = (
        make_panel("p50 latency, s", lambda row: row["latency"]["p50"]),
        make_panel("p99 latency, s", lambda row: row["latency"]["p99"]),
    )
    figures = [
        draw_panels(f"Tokens per second by way of batching\n{bench.title}", speeds),
        draw_panels(f"Latency by way of batching\n{bench.title}", latencies),
    ]
    return figures[::-1] if arrives else figures
