"""Ways of batching beside continuous batching, by how much answers vary in length.

Each line serves the same requests in each way (`batching.py` says what the ways are), in turns. Answers have gamma
distributed lengths of one mean and of the wanted coefficient of variation (`--length-cv`). All ways run the same
programs, so "slower by" is what the batching alone is worth: tokens/s of continuous batching over those of the way, in
the same round. "Useful" is the share of the answers' tokens that rows computed which was asked for.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from batching import WAYS, Served, serve
from instrument import add_engine_flags, explain_errors, make_parser, read_run

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.prompts import BenchRequest
from jaxserve.tools.bench.report import Spread
from jaxserve.tools.bench.setup import Bench, check_counts, repeat
from jaxserve.tools.bench.throughput import summarize_times
from jaxserve.tools.cli.bench_common import DRY_ENGINE, add_defaults
from jaxserve.tools.cli.flags import read_engine_options

if TYPE_CHECKING:
    import argparse

_TIMEOUT = 0.05
_FIT_TURNS = 50
_DRY = {"length_cv": [0.0, 1.0], "num_prompts": 8, "input_len": 8, "output_len": 6, "num_iters": 2}
_HEADER = ("cv", "way", "seconds", "tokens/s", "useful", "p50, s", "p99, s", "slower by")


@dataclass(frozen=True)
class Workload:
    """Requests whose answers vary in length by a wanted coefficient of variation, with the same mean.

    Attributes:
        request_rate: arrivals per second, at random; infinity: all at once.
        most: times the mean that an answer is at most.
    """

    num_requests: int
    input_len: int
    output_len: int
    request_rate: float = float("inf")
    seed: int = 0
    most: int = 12

    @property
    def max_model_len(self) -> int:
        """Tokens that a model must take for these requests."""
        return self.input_len + self.most * self.output_len + 1

    def make(self, cv: float, vocab_size: int) -> list[BenchRequest]:
        """Returns the requests. Prompts and arrivals are the same for every `cv`."""
        rng, found, now = random.Random(self.seed), list[BenchRequest](), 0.0
        lengths = make_lengths(self.num_requests, self.output_len, cv, self.most * self.output_len, self.seed)
        for length in lengths:
            ids = tuple(rng.randrange(min(10, vocab_size - 1), vocab_size) for _ in range(self.input_len))
            found.append(BenchRequest(ids, None, self.input_len, length, now))
            now += rng.expovariate(self.request_rate) if self.request_rate < float("inf") else 0.0
        return found


def make_lengths(count: int, wanted: float, cv: float, most: int, seed: int) -> list[int]:
    """Returns gamma-distributed lengths in [1, most], scaled so that their mean is the wanted one.

    A `cv` of 0 makes all equal, of 1 exponential.
    """
    if cv == 0:
        return [round(wanted)] * count
    rng, shape = random.Random(seed + 1), cv**-2
    drawn, scale = [rng.gammavariate(shape, 1 / shape) for _ in range(count)], wanted
    found = [round(wanted)] * count
    for _ in range(_FIT_TURNS):
        found = [min(most, max(1, round(scale * each))) for each in drawn]
        if abs(mean(found) / wanted - 1) < 1e-3:
            break
        scale *= wanted / mean(found)
    return found


def measure_cv(requests: Sequence[BenchRequest]) -> float:
    """Returns the coefficient of variation of the answers' lengths."""
    lengths = [each.max_tokens for each in requests]
    return pstdev(lengths) / mean(lengths)


def make_flags() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(__doc__)
    text = "beside continuous batching (default: %(default)s)"
    parser.add_argument("--ways", nargs="+", choices=WAYS[:-1], default=list(WAYS[:-1]), metavar="WAY", help=text)
    numbers: list[tuple[str, Any, Any, str]] = [
        ("--num-prompts", int, 128, "requests"),
        ("--input-len", int, 64, "tokens of a prompt"),
        ("--output-len", int, 48, "tokens of an answer, in the mean"),
        ("--request-rate", float, float("inf"), "requests per second, which arrive at random; inf: all at once"),
        ("--batch-timeout", float, _TIMEOUT, "seconds after its first request at which a dynamic batch is closed"),
        ("--num-iters", int, 3, "measured runs"),
        ("--num-iters-warmup", int, 1, "runs before the measured ones"),
    ]
    for flag, kind, default, text in numbers:
        metavar = kind.__name__.upper()
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")
    text = "coefficients of variation of the answers' lengths (default: 0 0.5 1 2)"
    parser.add_argument("--length-cv", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0], metavar="CV", help=text)
    add_engine_flags(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError about a flag whose value cannot be used."""
    check_counts(args, num_prompts=1, input_len=1, output_len=1, num_iters=1, num_iters_warmup=0)
    for field in ("request_rate", "batch_timeout"):
        if not (value := getattr(args, field)) > 0:
            raise ConfigError(f"must be above 0, got {value}", field=field, value=value)
    if args.batch_timeout != _TIMEOUT and "dynamic" not in args.ways:
        message = f"is for --ways dynamic; this is {' '.join(args.ways)}"
        raise ConfigError(message, field="batch_timeout", value=args.batch_timeout)
    if not all(0 <= cv < float("inf") for cv in args.length_cv):
        raise ConfigError(f"must be at least 0, got {args.length_cv}", field="length_cv", value=args.length_cv)


def open_bench(args: argparse.Namespace, workload: Workload) -> Bench:
    """Builds an engine that takes the longest request."""
    fitting = {"max_model_len": workload.max_model_len, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    defaults = fitting | (DRY_ENGINE if args.dry_run else {})
    return Bench.open(add_defaults(args, read_engine_options(args), defaults))


def measure(args: argparse.Namespace, bench: Bench, workload: Workload) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the figures of each way and coefficient of variation, and what failed."""
    ways = [way for way in WAYS if way in args.ways or way == "continuous"]
    rows, failures, shapes = list[dict[str, Any]](), list[str](), bench.llm.ready.shapes
    for cv in args.length_cv:
        requests = workload.make(cv, shapes.model.vocab_size)
        run = partial(serve, bench.llm, requests, rows=shapes.limits.max_num_seqs, timeout=args.batch_timeout)
        turns = repeat(
            lambda run=run: {way: run(way) for way in ways},
            num_iters=args.num_iters,
            num_warmup=args.num_iters_warmup,
        )
        rows += [summarize(cv, measure_cv(requests), way, turns) for way in ways]
        failures += [failure for turn in turns for served in turn.values() for failure in served.failures]
    return rows, list(dict.fromkeys(failures))


def summarize(cv: float, measured_cv: float, way: str, turns: Sequence[Mapping[str, Served]]) -> dict[str, Any]:
    """Returns the figures of one way."""
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


def make_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the line of a way in the table."""
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


def main() -> int:
    """Measures, prints the table and writes the report."""
    parser = make_flags()
    run = read_run(parser, _DRY)
    args = run.args
    with explain_errors(parser):
        check(args)
        workload = Workload(args.num_prompts, args.input_len, args.output_len, args.request_rate, args.seed or 0)
        bench = open_bench(args, workload)
        rows, failures = measure(args, bench, workload)
    notes = ["p50 and p99 are of the latency of a request, from its arrival to its last token."]
    if args.request_rate < float("inf"):
        notes.append("No way can make more tokens/s than arrive, so latencies tell more here.")
    title = f"Ways of batching, {args.num_prompts} requests, {bench.llm.ready.shapes.limits.max_num_seqs} rows"
    run.show(f"{title}: {bench.title}", _HEADER, [make_row(row) for row in rows], notes, left=(1,))
    return run.finish({**bench.describe(), "ways": rows}, failures)


if __name__ == "__main__":
    sys.exit(main())
