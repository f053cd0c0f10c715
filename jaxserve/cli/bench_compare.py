"""`jaxserve bench compare`: its flags, and what it prints."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxserve.bench.compare import JAXSERVE, PEERS, Comparison, Participant
from jaxserve.bench.datasets import BenchRequest, add_dataset_flags, make_requests, read_dataset_options
from jaxserve.bench.report import add_report_flags, make_report, read_report_paths
from jaxserve.bench.setup import check_counts, fill_dry_run
from jaxserve.cli.bench_common import add_benchmark, finish
from jaxserve.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16")
_TEXTS = ("demo", "custom", "sharegpt")
_DRY_ENGINE = {"max_num_batched_tokens": 64, "compile": "used"}
_DRY_RUN = {"num_prompts": 4, "random_input_len": 12, "random_output_len": 6, "rows": 4, "num_iters": 2}


def add_compare(group: Any) -> None:
    """Adds `bench compare`."""
    text = "run the same requests through jaxserve, its variants and other engines, which take turns"
    command = add_benchmark(group, "compare", _run_compare, text)
    group = command.add_argument_group("comparison")
    text = "a checkpoint's directory, or demo (default: demo)"
    group.add_argument("--model", metavar="DIR", help=text)
    group.add_argument("--dtype", choices=_DTYPES, default="float32", help="of all participants (default: %(default)s)")
    text = "requests that run at once, at most (default: %(default)s); 1: a single stream"
    group.add_argument("--rows", type=int, default=32, metavar="INT", help=text)
    text = "cores that each participant may use (default: all)"
    group.add_argument("--threads", type=int, metavar="INT", help=text)
    text = "rounds in which each participant runs once (default: %(default)s)"
    group.add_argument("--num-iters", type=int, default=3, metavar="INT", help=text)
    text = '"NAME: key=value, ...": jaxserve with options of its engine, once more; NAME jaxserve: the first one'
    group.add_argument("--with", dest="variants", action="append", default=[], metavar="TEXT", help=text)
    text = (
        f'"NAME[=PYTHON][: key=value, ...]": another engine, run by the interpreter that has it; repeatable. Names: '
        f"{', '.join(PEERS)}, or a FILE.py of your own"
    )
    group.add_argument("--peer", dest="peers", action="append", default=[], metavar="TEXT", help=text)
    text = "seconds in which a participant must load, and run (default: %(default)g)"
    group.add_argument("--peer-timeout", type=float, default=900.0, metavar="S", help=text)
    text = "tiny sizes in place of the defaults: seconds with the demo model, to try the command"
    group.add_argument("--dry-run", action="store_true", help=text)
    add_dataset_flags(command, num_prompts=64)
    add_report_flags(command)


def _run_compare(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command. A participant that is skipped is no failure."""
    from rich.console import Console

    from jaxserve.bench.compare import compare
    from jaxserve.bench.compare_report import list_failures, list_notes, make_table, summarize
    from jaxserve.bench.environment import describe_environment

    is_random = args.dataset_name == "random"
    sizes = {name: size for name, size in _DRY_RUN.items() if is_random or not name.startswith("random")}
    args = fill_dry_run(args, command, sizes)
    paths, participants, comparison = read_report_paths(args, "compare"), read_participants(args), read_comparison(args)
    with end_by_signal():
        outcomes = compare(comparison, participants)
    figures = summarize(comparison, outcomes)
    console = Console(highlight=False)
    console.print(make_table(figures))
    for note in list_notes(figures):
        console.print(note, markup=False, soft_wrap=True)
    report = make_report(
        args, "compare", describe_environment(has_devices=False), figures, failures=list_failures(outcomes)
    )
    return finish(report, paths)


@contextmanager
def end_by_signal() -> Iterator[None]:
    """Makes SIGTERM an exit, which ends the participants; those that are stopped would stay for ever."""

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def read_participants(args: argparse.Namespace) -> list[Participant]:
    """Returns jaxserve, its variants and the peers; ConfigError about a malformed one, or two of one name."""
    options = _DRY_ENGINE if args.dry_run else {}
    variants = [Participant.parse_variant(text, options) for text in args.variants]
    if all(each.name != JAXSERVE for each in variants):
        variants.insert(0, Participant.of_jaxserve(JAXSERVE, options))
    variants.sort(key=lambda each: each.name != JAXSERVE)
    found = [*variants, *map(Participant.parse_peer, args.peers)]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two participants are named {name!r}; give each its own", field="with", value=name)
    return found


def read_comparison(args: argparse.Namespace) -> Comparison:
    """Returns what all participants have in common.

    Raises:
        ConfigError: flags are wrong, the model is not here, or a request has no tokens.
    """
    from jaxserve.presets import demo_model_dir
    from jaxserve.weights import read_hf_config

    check_counts(args, rows=1, num_iters=1, **({"threads": 1} if args.threads is not None else {}))
    if not args.peer_timeout > 0:
        raise ConfigError("must be above 0", field="peer_timeout", value=args.peer_timeout)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (args.threads or 1) > cores:
        raise ConfigError(f"this process may use {cores} cores", field="threads", value=args.threads)
    if args.served is not None:
        if args.model is not None:
            raise ConfigError(f"given twice, also as {args.served!r}", field="model", value=args.model)
        args.model = args.served
    args.model = args.model or "demo"
    model = demo_model_dir() if args.model == "demo" else Path(args.model)
    if not (model / "config.json").is_file():
        message = f"{model} has no config.json; every participant reads a checkpoint's directory, or use demo"
        raise ConfigError(message, field="model", value=args.model)
    dataset = read_dataset_options(args)
    return Comparison(
        str(model.absolute()),
        _make_requests(args, model, read_hf_config(model)),
        args.dtype,
        rows=args.rows,
        threads=args.threads or cores,
        ignores_eos=dataset.ignores_eos,
        num_iters=args.num_iters,
        timeout=args.peer_timeout,
    )


def _make_requests(args: argparse.Namespace, model: Path, config: dict[str, Any]) -> list[BenchRequest]:
    from jaxserve.tokenizers import load_tokenizer

    dataset = read_dataset_options(args)
    tokenizer = load_tokenizer(model) if dataset.name in _TEXTS else None
    return make_requests(
        dataset,
        vocab_size=int(config["vocab_size"]),
        tokenizer=tokenizer,
        max_model_len=config.get("max_position_embeddings"),
    )
