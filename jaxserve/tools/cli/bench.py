"""`jaxserve bench`: the flags of each benchmark, and what it prints and writes."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.tools.bench.datasets import add_dataset_flags, make_requests, read_dataset_options
from jaxserve.tools.bench.report import add_report_flags, make_report, read_report_paths
from jaxserve.tools.bench.setup import add_iteration_flags, check_counts, fill_dry_run
from jaxserve.tools.cli.bench_common import DRY_ENGINE, add_benchmark, add_defaults, finish, print_result
from jaxserve.tools.cli.bench_serve import add_serve
from jaxserve.tools.cli.bench_sweep import add_sweep
from jaxserve.tools.cli.flags import add_command, add_command_options, read_engine_options

_DRY_THROUGHPUT = {"num_prompts": 6, "num_iters": 2, "random_input_len": 24, "random_output_len": 8}
_DRY_LATENCY = {"batch_size": 2, "input_len": 16, "output_len": 8, "num_iters": 3, "num_iters_warmup": 1}


def add_bench(group: Any) -> None:
    """Adds `bench` with its subcommands to the commands."""
    text = "measure: throughput, latency, batch sizes, servers under load"
    command = add_command(group, "bench", None, text, "COMMAND")
    command.set_defaults(run=partial(_show_help, command))
    benchmarks = command.add_subparsers(title="benchmarks", metavar="COMMAND")
    _add_throughput(benchmarks)
    _add_latency(benchmarks)
    add_sweep(benchmarks)
    add_serve(benchmarks)


def _show_help(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    del args
    command.print_help(sys.stderr)
    return 2


def _add_throughput(group: Any) -> None:
    text = "send all requests of a dataset at once and time them to the last answer"
    command = add_benchmark(group, "throughput", _run_throughput, text)
    add_dataset_flags(command, has_seed=True)
    runs = add_iteration_flags(command, num_iters=3, num_warmup=1)
    runs.add_argument("--disable-detokenize", action="store_true", help="leave answers as token ids (default: off)")
    add_report_flags(command)
    add_command_options(command, (EngineConfig,))


def _run_throughput(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from jaxserve.tools.bench.environment import describe_environment
    from jaxserve.tools.bench.runs import RunOptions
    from jaxserve.tools.bench.setup import Bench
    from jaxserve.tools.bench.throughput import (
        list_failures,
        make_throughput_table,
        measure_throughput,
        summarize_runs,
    )

    is_random = args.dataset_name == "random"
    sizes = {name: size for name, size in _DRY_THROUGHPUT.items() if is_random or not name.startswith("random")}
    args = fill_dry_run(args, command, sizes)
    check_counts(args, num_iters=1, num_iters_warmup=0)
    paths, dataset = read_report_paths(args, "throughput"), read_dataset_options(args)
    bench = Bench.open(add_defaults(args, read_engine_options(args), DRY_ENGINE if args.dry_run else {}))
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


def _add_latency(group: Any) -> None:
    text = "time one batch of equal requests from the call to its last token"
    command = add_benchmark(group, "latency", _run_latency, text)
    batch = command.add_argument_group("batch")
    for flag, default, help_text in (
        ("--batch-size", 8, "rows"),
        ("--input-len", 32, "tokens of a prompt"),
        ("--output-len", 128, "tokens of an answer"),
    ):
        text = f"{help_text} (default: {default})"
        batch.add_argument(flag, type=int, default=default, metavar="INT", help=text)
    add_iteration_flags(command, num_iters=30, num_warmup=10)
    add_report_flags(command)
    add_command_options(command, (EngineConfig,))


def _run_latency(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from jaxserve.tools.bench.environment import describe_environment
    from jaxserve.tools.bench.latency import make_batch, make_latency_table, measure_latency, summarize_latency
    from jaxserve.tools.bench.setup import Bench
    from jaxserve.tools.bench.throughput import list_failures

    args = fill_dry_run(args, command, _DRY_LATENCY)
    check_counts(args, batch_size=1, input_len=1, output_len=1, num_iters=1, num_iters_warmup=0)
    paths = read_report_paths(args, "latency")
    defaults = {"max_num_seqs": args.batch_size, "skip_tokenizer_init": True} | (DRY_ENGINE if args.dry_run else {})
    bench = Bench.open(add_defaults(args, read_engine_options(args), defaults))
    batch = make_batch(bench, args.batch_size, args.input_len, args.output_len, args.seed or 0)
    runs = measure_latency(bench, batch, num_iters=args.num_iters, num_warmup=args.num_iters_warmup)
    figures = summarize_latency(bench, runs)
    print_result(make_latency_table(bench, figures, batch), bench)
    report = make_report(args, "latency", describe_environment(), figures, failures=list_failures(runs))
    return finish(report, paths)
