"""Benchmark of sampling: the cost of each feature, compared with greedy sampling and with the model's step.

The step is a decode step of a preset with random weights and without attention (`null_step.py`), up to the logits that
the features then get. With attention it takes longer, so the printed shares of it are upper limits. Features of one
program are turned on by its inputs alone, as in the engine, on every row but padding rows. Times are the best of
several rounds, all of which are in the report.

On Linux `MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=34359738368` keeps memory between calls. Without
them glibc maps large buffers anew in each call; without the first alone, those of more than 32 MiB.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from instrument import Instrument, make_parser, read_run
from null_step import NullModel, NullStep, load_model, make_step

from jaxserve.core.runtime.step import compute_prompt_logprobs, head_params
from jaxserve.core.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    RowSetting,
    SamplerState,
    SamplingInputs,
    compute_logprobs,
    draw_uniforms,
    gather_logprobs,
    is_finite,
    make_row_setting,
    map_rows,
    mask_logits,
    record,
    sample,
    sample_greedy,
    sampler_state_specs,
    set_row,
    shape_logits,
)

PRESETS = ["phi-3-mini-4k", "llama-3.2-1b", "gemma-2-2b", "gemma-3-1b"]  # small ones with 32k, 128k and 256k tokens
PROMPT = 1000  # tokens of every row's prompt
OUTPUT = 200  # tokens sampled so far
FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.05}
RANDOM = {
    "temperature": {},
    **{name: {name: value} for name, value in FILTERS.items()},
    "top_k + top_p + min_p": FILTERS,
}
PENALTIES = {"presence": 0.5, "frequency": 0.25, "repetition": 1.1}
ALL_PLAIN = "all plain parameters"  # all that a request can ask of sampling but grammars and log-probabilities


@dataclass(frozen=True)
class Case:
    """A program to measure. With `make_state` its first argument is a donated state, which it returns first."""

    name: str
    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    make_state: Callable[[], Any] | None = None


def make_inputs(rows: int, bucket_rows: int, **values: float) -> SamplingInputs:
    """Returns equal parameters for `rows` rows, and zeros for padding rows."""
    columns = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    columns |= dict.fromkeys(("top_k", "seed_high", "sequence_index", "has_edits"), 0) | {"positions": PROMPT + OUTPUT}
    is_row = np.arange(bucket_rows) < rows
    lines = {name: jnp.asarray(is_row * np.array(values.get(name, value))) for name, value in columns.items()}
    return SamplingInputs(**lines, seed_low=jnp.arange(bucket_rows))


def make_settings(vocab_size: int) -> dict[str, RowSetting]:
    """Returns a row's setting for each feature, at the feature's limit."""
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
    return map_rows(sample_greedy, logits)


@jax.jit
def run_random(logits: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, jax.Array]:
    function = functools.partial(sample, vocab_size=logits.shape[1])
    return map_rows(function, logits, inputs, draw_uniforms(inputs))


@functools.partial(jax.jit, donate_argnums=0)
def run_full(state: SamplerState, logits: jax.Array, inputs: SamplingInputs, mask: jax.Array | None) -> Any:
    """Runs the masked variant, or the full one if `mask` is None."""
    rows, vocab_size = logits.shape
    row_ids = jnp.arange(rows)

    def sample_row(line: Any, mask: Any, row_id: Any, inputs: SamplingInputs, uniform: Any) -> tuple[jax.Array, ...]:
        allowed = line if mask is None else mask_logits(line, mask)
        shaped = shape_logits(allowed, inputs, state, row_id, vocab_size=vocab_size)
        return *sample(shaped, inputs, uniform, vocab_size=vocab_size), is_finite(line)

    ids, *flags = map_rows(sample_row, logits, mask, row_ids, inputs, draw_uniforms(inputs))
    return record(state, row_ids, ids, inputs.has_edits != 0), ids, *flags


@functools.partial(jax.jit, static_argnames="k")
def run_logprobs(logits: jax.Array, k: int) -> Any:
    ids, _ = map_rows(sample_greedy, logits)
    return ids, gather_logprobs(logits, ids, k, vocab_size=logits.shape[1])


@jax.jit
def run_all_logprobs(logits: jax.Array) -> Any:
    return compute_logprobs(logits, vocab_size=logits.shape[1])


def make_cases(rows: int, model: NullModel, step: NullStep) -> Iterator[Case]:
    """Yields all cases, the two references first."""
    vocab_size, bucket_rows = model.decoder.vocab_size, step.bucket_rows
    yield Case("step", step.run, (), step.make_state)
    _, selected, hidden = step.run(step.make_state())
    logits = selected.logits
    yield Case("greedy", run_greedy, (logits,))
    for name, values in RANDOM.items():
        yield Case(name, run_random, (logits, make_inputs(rows, bucket_rows, **values)))
    yield from make_full_cases(rows, logits)
    for k in (0, 5, 20):
        yield Case(f"greedy + logprobs {k}", functools.partial(run_logprobs, k=k), (logits,))
    yield Case("logprobs of all", run_all_logprobs, (logits,))
    program = jax.jit(functools.partial(compute_prompt_logprobs, model=step.model, max_logprobs=5))
    targets = jnp.arange(bucket_rows) % vocab_size
    yield Case("prompt_logprobs 5, head included", program, (head_params(model.params), hidden.last, targets))


def make_full_cases(rows: int, logits: jax.Array) -> Iterator[Case]:
    """Yields the cases of what changes logits."""
    bucket_rows, vocab_size = logits.shape
    settings = make_settings(vocab_size)
    mask = jnp.full((bucket_rows, -(-vocab_size // 32)), 0x55555555, jnp.uint32)

    def make_case(name: str, setting: str, mask: jax.Array | None = None, **values: float) -> Case:
        inputs = make_inputs(rows, bucket_rows, **values)
        state = functools.partial(fill_state, settings[setting], bucket_rows + 1)
        return Case(name, run_full, (logits, inputs, mask), state)

    yield make_case("full: switched off", "penalties")
    for name in settings:
        penalties = PENALTIES if name in ("penalties", "everything") else {}
        yield make_case(f"full: {name}", name, has_edits=1, **penalties)
    yield make_case(ALL_PLAIN, "everything", has_edits=1, **PENALTIES, **FILTERS)
    yield make_case("masked: everything", "everything", mask, has_edits=1, **PENALTIES)


def measure(case: Case) -> float:
    """Returns the seconds of a call, after a warm-up call; on accelerators the mean of ten overlapping calls."""
    calls = 1 if jax.default_backend() == "cpu" else 10
    state = None if case.make_state is None else case.make_state()
    start = 0.0
    for number in range(calls + 1):
        if state is None:
            result = case.program(*case.arguments)
        else:
            state, *result = case.program(state, *case.arguments)
        if number == 0:
            jax.block_until_ready((result, state))
            start = time.perf_counter()
    jax.block_until_ready((result, state))
    return (time.perf_counter() - start) / calls


def measure_set_row(rows: int, vocab_size: int, repeats: int) -> float:
    """Returns the least seconds to build, upload and write a row's setting."""
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


def measure_point(rows: int, model: NullModel, repeats: int) -> dict[str, Any]:
    decoder, step = model.decoder, make_step(model, rows, PROMPT + OUTPUT)
    cases = list(make_cases(rows, model, step))
    # All cases in turn, so that other work on the machine disturbs them alike.
    rounds = [{case.name: measure(case) for case in cases} for _ in range(repeats)]
    seconds = {case.name: min(times[case.name] for times in rounds) for case in cases}
    seconds["set_row (one)"] = measure_set_row(step.bucket_rows, decoder.vocab_size, repeats)
    specs = jax.tree.leaves(sampler_state_specs(1, decoder.vocab_size))
    return {
        "model": model.name,
        "dtype": decoder.dtype,
        "rows": rows,
        "bucket_rows": step.bucket_rows,
        "vocab_size": decoder.vocab_size,
        "state_bytes_per_row": sum(spec.size * spec.dtype.itemsize for spec in specs),
        "seconds": seconds,
        "rounds": rounds,
    }


def show(run: Instrument, point: dict[str, Any]) -> None:
    rows, bucket_rows, seconds = point["rows"], point["bucket_rows"], point["seconds"]
    bucket = "" if bucket_rows == rows else f" in a bucket of {bucket_rows}"
    lines = [
        (name, f"{1e3 * t:.3f}", f"{t / seconds['greedy']:.2f}", f"{100 * t / seconds['step']:.1f} %")
        for name, t in seconds.items()
    ]
    title = f"B = {rows}{bucket}, V = {point['vocab_size']}; the step is of {point['model']}"
    state = f"state: {point['state_bytes_per_row'] / 2**20:.2f} MiB per row"
    run.show(title, ("", "ms", "x greedy", "share of step"), lines, [state])


def measure_preset(run: Instrument, preset: str, dtype: str, rows: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the points of one preset; one model is held at a time."""
    model = load_model(preset, dtype)
    for count in rows:
        point = measure_point(count, model, repeats)
        show(run, point)
        yield point


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument(
        "--presets", nargs="+", default=PRESETS, help="whose step and vocabulary it is (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="of the model (default: the preset's)")
    parser.add_argument("--repeats", type=int, default=7)
    run = read_run(parser, {"rows": [1], "presets": ["llama-30m"], "repeats": 2})
    args = run.args
    points: list[dict[str, Any]] = []
    for preset in args.presets:
        for point in measure_preset(run, preset, args.dtype, args.rows, args.repeats):
            points.append(point)
            run.save({"points": points})  # after each: a run that is cut off keeps its points


if __name__ == "__main__":
    main()
