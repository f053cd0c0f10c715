"""The same requests through jaxserve, its variants and other engines, which take turns.

Each participant is a process that loads, runs all requests once to warm up, and then waits, stopped, for its turn.
`docs/benchmarks.md` says which engines there are, and how one of your own takes part. One that is not installed, fails
or hangs is skipped by name, which is no failure.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison import JAXSERVE, PEERS, Comparison, Participant, compare
from comparison_report import list_failures, list_notes, make_header, make_rows, make_title, summarize
from instrument import explain_errors, make_parser, read_run

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.datasets import BenchRequest, add_dataset_flags, make_requests, read_dataset_options
from jaxserve.tools.bench.environment import count_cores
from jaxserve.tools.bench.setup import check_counts, fill_dry_run

_DTYPES = ("float32", "bfloat16", "float16")
_TEXTS = ("demo", "custom", "sharegpt")
_DRY_ENGINE = {"max_num_batched_tokens": 64, "compile": "used"}
_DRY_RUN = {"num_prompts": 4, "rows": 4, "num_iters": 2}
_DRY_LENGTHS = {"random_input_len": 12, "random_output_len": 6}  # flags of one dataset, refused with others


def make_flags() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(__doc__)
    text = "a checkpoint's directory, or demo (default: %(default)s)"
    parser.add_argument("--model", metavar="DIR", default="demo", help=text)
    text = "of all participants (default: %(default)s)"
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help=text)
    text = "requests that run at once, at most (default: %(default)s); 1: a single stream"
    parser.add_argument("--rows", type=int, default=32, metavar="INT", help=text)
    text = "cores that each participant may use (default: all)"
    parser.add_argument("--threads", type=int, metavar="INT", help=text)
    text = "rounds in which each participant runs once (default: %(default)s)"
    parser.add_argument("--num-iters", type=int, default=3, metavar="INT", help=text)
    text = '"NAME: key=value, ...": jaxserve with options of its engine, once more; NAME jaxserve: the first one'
    parser.add_argument("--with", dest="variants", action="append", default=[], metavar="TEXT", help=text)
    text = (
        f'"NAME[=PYTHON][: key=value, ...]": another engine, run by the interpreter that has it; repeatable. Names: '
        f"{', '.join(PEERS)}, or a FILE.py of your own"
    )
    parser.add_argument("--peer", dest="peers", action="append", default=[], metavar="TEXT", help=text)
    text = "seconds in which a participant must load, and run (default: %(default)g)"
    parser.add_argument("--peer-timeout", type=float, default=900.0, metavar="S", help=text)
    add_dataset_flags(parser, num_prompts=64)
    return parser


def main() -> int:
    """Measures, prints the table and writes the report."""
    parser = make_flags()
    run = read_run(parser, _DRY_RUN, has_devices=False)  # the participants need them
    if run.args.dataset_name == "random":
        run = replace(run, args=fill_dry_run(run.args, parser, _DRY_LENGTHS))
    with explain_errors(parser):
        participants, comparison = read_participants(run.args), read_comparison(run.args)
    signal.signal(signal.SIGTERM, leave)
    pace, *outcomes = compare(comparison, [Participant.of_pace(), *participants])
    figures = summarize(comparison, outcomes, pace)
    run.show(make_title(figures), make_header(figures), make_rows(figures), list_notes(figures))
    return run.finish(figures, list_failures(outcomes))


def leave(number: int, frame: object) -> None:
    """Exits, which ends the participants; those that are stopped would stay for ever."""
    del frame
    raise SystemExit(128 + number)


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
    from jaxserve.core.weights import read_hf_config
    from jaxserve.presets import demo_model_dir

    check_counts(args, rows=1, num_iters=1, **({"threads": 1} if args.threads is not None else {}))
    if not args.peer_timeout > 0:
        raise ConfigError("must be above 0", field="peer_timeout", value=args.peer_timeout)
    cores = count_cores()
    if (args.threads or 1) > cores:
        raise ConfigError(f"this process may use {cores} cores", field="threads", value=args.threads)
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


if __name__ == "__main__":
    sys.exit(main())
