"""`jaxserve bench`: the flags of each benchmark, and what it prints and writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.bench.datasets import add_dataset_flags, make_requests, read_dataset_options
from jaxserve.bench.report import Report, add_report_flags, make_report, read_report_paths
from jaxserve.bench.setup import add_iteration_flags, check_counts, fill_dry_run
from jaxserve.cli import bench_compare, bench_serve
from jaxserve.cli.flags import add_command, add_command_options, read_engine_options
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.bench.setup import Bench

DRY_ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "compile": "used"}
_DRY_THROUGHPUT = {"num_prompts": 6, "num_iters": 2, "random_input_len": 24, "random_output_len": 8}


def add_bench(group: Any) -> None:
    """Adds `bench` with its subcommands to the commands."""
    text = "measure: throughput, latency, starts, batch sizes and ways of batching"
    command = add_command(group, "bench", None, text, "COMMAND")
    command.set_defaults(run=partial(_show_help, command))
    benchmarks = command.add_subparsers(title="benchmarks", metavar="COMMAND")
    _add_throughput(benchmarks)
    serve = add_benchmark(benchmarks, "serve", partial(bench_serve.run_serve, finish), bench_serve.TEXT, "")
    bench_serve.add_serve_flags(serve)
    compare = add_benchmark(benchmarks, "compare", partial(bench_compare.run_compare, finish), bench_compare.TEXT)
    bench_compare.add_compare_flags(compare)


def _show_help(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    del args
    command.print_help(sys.stderr)
    return 2


def add_benchmark(
    group: Any,
    name: str,
    run: Callable[[argparse.ArgumentParser, argparse.Namespace], int | None],
    text: str,
    words: str = "[MODEL]",
) -> argparse.ArgumentParser:
    """Adds one benchmark, whose function also gets its parser."""
    command = add_command(group, name, None, text, words, prefix="bench ")
    command.set_defaults(run=partial(run, command))
    return command


def finish(report: Report, paths: Sequence[Path]) -> int:
    """Saves a report and names its files and failures; returns the exit status, 1 if something failed."""
    report.save(paths)
    for path in paths:
        print(f"The report is in {path}.")
    for failure in report.failures:
        print(f"jaxserve bench: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


def print_result(table: Any, bench: Bench) -> None:
    """Prints a table, and the rates that it compares with."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table)
    console.print(f"Limits measured in this run: {bench.limits.describe()}.")


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the engine's options. All programs are compiled before the clock runs, unless the user says otherwise."""
    return ({"compile": "all"} | (DRY_ENGINE if args.dry_run else {})) | read_engine_options(args)


def _add_throughput(group: Any) -> None:
    text = "send all requests of a dataset at once and time them to the last answer"
    command = add_benchmark(group, "throughput", _run_throughput, text)
    add_dataset_flags(command, has_seed=True)
    runs = add_iteration_flags(command, num_iters=3, num_warmup=1)
    runs.add_argument("--disable-detokenize", action="store_true", help="leave answers as token ids (default: off)")
    add_report_flags(command)
    add_command_options(command, (EngineConfig,))


def _run_throughput(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from jaxserve.bench.environment import describe_environment
    from jaxserve.bench.runs import RunOptions
    from jaxserve.bench.setup import Bench
    from jaxserve.bench.throughput import list_failures, make_throughput_table, measure_throughput, summarize_runs

    is_random = args.dataset_name == "random"
    sizes = {name: size for name, size in _DRY_THROUGHPUT.items() if is_random or not name.startswith("random")}
    args = fill_dry_run(args, command, sizes)
    check_counts(args, num_iters=1, num_iters_warmup=0)
    paths, dataset = read_report_paths(args, "throughput"), read_dataset_options(args)
    bench = Bench.open(read_options(args))
    ready = bench.llm.ready
    requests = make_requests(
        dataset,
        vocab_size=ready.shapes.model.vocab_size,
        tokenizer=ready.tokenizer,
        max_model_len=ready.shapes.model.max_model_len,
    )
    options = RunOptions(ignores_eos=dataset.ignores_eos, detokenizes=not args.disable_detokenize)
    warmup = args.num_iters_warmup
    runs = measure_throughput(bench, requests, options, num_iters=args.num_iters, num_warmup=warmup)
    figures = summarize_runs(bench, requests, runs)
    print_result(make_throughput_table(bench, figures), bench)
    report = make_report(args, "throughput", describe_environment(), figures, failures=list_failures(runs))
    return finish(report, paths)
