"""What each sampling feature costs, beside the plainest choice of a token and beside the smallest step there could be.

The step is one product [B, D] x [D, V]: the head of a model of D channels, without layers and without attention. A
real step takes longer, so the shares of it that are printed are upper limits. Features of one program are turned on by
its inputs alone, as in the engine; times are the best of several runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    RowSetting,
    SamplerState,
    SamplingInputs,
    finite_rows,
    make_row_setting,
    mask_logits,
    record,
    sample,
    sample_greedy,
    sampler_state_specs,
    score_all,
    score_prompt,
    score_tokens,
    set_row,
    shape_logits,
)

PROMPT = 1000  # tokens of every row's prompt
OUTPUT = 200  # and sampled so far
RANDOM = {
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k + top_p + min_p": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
}
PENALTIES = {"presence": 0.5, "frequency": 0.25, "repetition": 1.1}

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]  # name, program, arguments


def make_inputs(rows: int, **values: float) -> SamplingInputs:
    columns = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    floats = {name: jnp.full(rows, values.get(name, value), jnp.float32) for name, value in columns.items()}
    names = ("top_k", "seed_high", "sequence_index", "has_edits")
    integers = {name: jnp.full(rows, values.get(name, 0), jnp.int32) for name in names}
    positions = jnp.full(rows, PROMPT + OUTPUT, jnp.int32)
    return SamplingInputs(**floats, **integers, seed_low=jnp.arange(rows), positions=positions)


def make_settings(vocab_size: int) -> dict[str, RowSetting]:
    """Returns what a row is set to for each feature, at its limit."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, PROMPT + OUTPUT)
    words = rng.integers(0, vocab_size, (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS))
    some = rng.permutation(vocab_size)[: min(300, vocab_size)].tolist()
    options: dict[str, dict[str, Any]] = {
        "penalties": {},
        "logit_bias (300)": {"logit_bias": dict.fromkeys(some, 1.5)},
        "min_tokens (257)": {"banned_ids": some[:257], "banned_until": 2**30},
        "allowed ids": {"allowed_ids": range(0, vocab_size, 2)},
        "bad_words (64)": {"bad_words": words.tolist()},
    }
    options["everything"] = functools.reduce(lambda left, right: left | right, options.values())
    prompt, output = tokens[:PROMPT].tolist(), tokens[PROMPT:].tolist()
    return {name: make_row_setting(vocab_size, prompt, output, **wish) for name, wish in options.items()}


@functools.partial(jax.jit, static_argnames="rows")
def fill_state(setting: RowSetting, rows: int) -> SamplerState:
    return SamplerState(**{name: jnp.repeat(line[None], rows, axis=0) for name, line in vars(setting).items()})


@jax.jit
def run_greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sample_greedy(logits), finite_rows(logits)


@jax.jit
def run_random(logits: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, jax.Array]:
    return sample(logits, inputs, vocab_size=logits.shape[1]), finite_rows(logits)


@functools.partial(jax.jit, donate_argnums=0)
def run_full(state: SamplerState, logits: jax.Array, inputs: SamplingInputs, mask: jax.Array | None) -> Any:
    """`mask` None is the full variant, else the masked one."""
    rows, vocab_size = logits.shape
    row_ids = jnp.arange(rows)
    allowed = logits if mask is None else mask_logits(logits, mask)
    shaped = shape_logits(allowed, inputs, state, row_ids, vocab_size=vocab_size)
    ids = sample(shaped, inputs, vocab_size=vocab_size)
    state = record(state, row_ids, ids, inputs.has_edits != 0)
    return state, ids, finite_rows(logits), finite_rows(shaped)


@functools.partial(jax.jit, static_argnames="k")
def run_scores(logits: jax.Array, k: int) -> Any:
    ids = sample_greedy(logits)
    return ids, score_tokens(logits, ids, k, vocab_size=logits.shape[1])


@jax.jit
def run_all_scores(logits: jax.Array) -> Any:
    return score_all(logits, vocab_size=logits.shape[1])


@jax.jit
def run_head(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


@jax.jit
def run_prompt_scores(hidden: jax.Array, head: jax.Array) -> Any:
    targets = jnp.arange(len(hidden))
    return score_prompt(hidden, lambda states: run_head(states, head), targets, 5, vocab_size=head.shape[1])


def make_cases(rows: int, head: jax.Array) -> Iterator[Case]:
    """Yields what is measured, the two references first. A program that takes a state is given it by `measure`."""
    hidden_size, vocab_size = head.shape
    hidden = jax.random.normal(jax.random.key(1), (rows, hidden_size), head.dtype)
    logits = run_head(hidden, head)
    yield "step", run_head, (hidden, head)
    yield "greedy", run_greedy, (logits,)
    for name, values in RANDOM.items():
        yield name, run_random, (logits, make_inputs(rows, **values))
    settings = make_settings(vocab_size)
    yield "full: switched off", run_full, (settings["penalties"], logits, make_inputs(rows), None)
    for name, setting in settings.items():
        inputs = make_inputs(rows, has_edits=1, **(PENALTIES if name in ("penalties", "everything") else {}))
        yield f"full: {name}", run_full, (setting, logits, inputs, None)
    mask = jnp.full((rows, -(-vocab_size // 32)), 0x55555555, jnp.uint32)
    inputs = make_inputs(rows, has_edits=1, **PENALTIES)
    yield "masked: everything", run_full, (settings["everything"], logits, inputs, mask)
    for k in (0, 5, 20):
        yield f"greedy + logprobs {k}", functools.partial(run_scores, k=k), (logits,)
    yield "logprobs of all", run_all_scores, (logits,)
    yield "step + prompt_logprobs 5", run_prompt_scores, (hidden, head)


def measure(rows: int, case: Case) -> float:
    """Returns the seconds of a call, after one that does not count; an accelerator makes ten, and overlaps launches."""
    _, program, arguments = case
    calls = 1 if jax.default_backend() == "cpu" else 10
    state = None
    if program is run_full:
        setting, *rest = arguments
        state, arguments = fill_state(setting, rows + 1), tuple(rest)
    start = 0.0
    for number in range(calls + 1):
        result = program(*arguments) if state is None else program(state, *arguments)
        if state is not None:
            state, *result = result
        if number == 0:
            jax.block_until_ready((result, state))
            start = time.perf_counter()
    jax.block_until_ready((result, state))
    return (time.perf_counter() - start) / calls


def measure_set_row(rows: int, vocab_size: int, repeats: int) -> float:
    """Returns the best seconds to build a row's setting, upload and write it."""
    state = fill_state(make_row_setting(vocab_size, (), ()), rows + 1)
    program = jax.jit(set_row, donate_argnums=0)
    tokens = np.random.default_rng(0).integers(0, vocab_size, PROMPT).tolist()
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        setting = make_row_setting(vocab_size, tokens, ())
        state = program(state, *jax.device_put((np.int32(0), setting)))
        jax.block_until_ready(state)
        best = min(best, time.perf_counter() - start)
    return best


def measure_point(rows: int, head: jax.Array, repeats: int) -> dict[str, Any]:
    cases = list(make_cases(rows, head))
    # All cases in turn, again and again: what else the machine does then disturbs none of them more than the others.
    rounds = [[measure(rows, case) for case in cases] for _ in range(repeats)]
    seconds = {case[0]: min(times) for case, times in zip(cases, zip(*rounds, strict=True), strict=True)}
    seconds["set_row (one)"] = measure_set_row(rows, head.shape[1], repeats)
    specs = jax.tree.leaves(sampler_state_specs(1, head.shape[1]))
    return {
        "rows": rows,
        "vocab_size": head.shape[1],
        "hidden_size": head.shape[0],
        "dtype": str(head.dtype),
        "state_bytes_per_row": sum(spec.size * spec.dtype.itemsize for spec in specs),
        "seconds": seconds,
    }


def show(console: Console, point: dict[str, Any]) -> None:
    rows, vocab_size, seconds = point["rows"], point["vocab_size"], point["seconds"]
    table = Table(title=f"B = {rows}, V = {vocab_size}, D = {point['hidden_size']}, {point['dtype']}")
    for column in ("", "ms", "x greedy", "share of step"):
        table.add_column(column, justify="right" if column else "left")
    for name, taken in seconds.items():
        share = f"{100 * taken / seconds['step']:.1f} %"
        table.add_row(name, f"{1e3 * taken:.3f}", f"{taken / seconds['greedy']:.2f}", share)
    console.print(table)
    console.print(f"state: {point['state_bytes_per_row'] / 2**20:.2f} MiB per row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256, 262_144])
    parser.add_argument("--hidden", type=int, default=2048, help="channels of the head that stands for the step")
    parser.add_argument("--dtype", help="of the head (default: float32 on CPU, else bfloat16)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.vocab, args.hidden, args.repeats = [4], [1000], 64, 2
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    console, points = Console(), []
    console.print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for vocab_size in args.vocab:
        head = jax.random.normal(jax.random.key(0), (args.hidden, vocab_size), dtype) * dtype.type(0.05)
        for rows in args.rows:
            points.append(measure_point(rows, head, args.repeats))
            show(console, points[-1])
    if args.json:
        document = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "points": points}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
