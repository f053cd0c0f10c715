"""Compiles the closed set of programs before the engine is ready."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxserve.runtime.buckets import Bucket, BucketTable
from jaxserve.runtime.inputs import InputLayout, StateShape
from jaxserve.runtime.rows import SampleVariant
from jaxserve.runtime.runner import Programs
from jaxserve.runtime.state import KVCache, RowState
from jaxserve.runtime.step import (
    SampleInputs,
    StepModel,
    choose_shaped_tokens,
    choose_tokens,
    forward,
    head_params,
    pool_last,
    score_prompt_tokens,
    score_step,
)
from jaxserve.sampling import SamplerState, make_row_setting, set_row
from jaxserve.sampling.state import WORD_BITS
from jaxserve.sampling_params import limit_prompt_logprobs

Progress = Callable[[str, int, int], None]  # (what was done, how many, of how many)


@dataclass(frozen=True)
class ProgramInputs:
    """Abstract values of everything the programs take."""

    params: Any
    cache: KVCache
    rows: RowState
    sampler: SamplerState
    state_shape: StateShape
    replicated: Sharding

    def spec(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """An array that is whole on every device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # also sent when the persistent cache has the program


@functools.cache  # one listener a process
def watch_compiles() -> Callable[[], int]:
    """Returns a function that tells how many programs XLA compiled in this process since the first call of this one."""
    count = 0

    def listen(event: str, seconds: float, **_: Any) -> None:
        nonlocal count
        del seconds
        if event == _COMPILE_EVENT:
            count += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: count


def enable_persistent_cache(directory: Path | None) -> None:
    """Lets JAX keep compiled programs in `directory` between starts; None leaves its settings alone."""
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_forward(model: StepModel, inputs: ProgramInputs, bucket: Bucket) -> Any:
    """Compiles the forward program of one bucket."""
    return trace_forward(model, inputs, bucket).lower().compile()


def trace_forward(model: StepModel, inputs: ProgramInputs, bucket: Bucket) -> Any:
    """Traces the forward program of one bucket; what it is lowered for is the caller's to say."""
    layout = InputLayout(bucket, inputs.state_shape)
    step = functools.partial(forward, model=model, layout=layout)
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=inputs.replicated)
    outputs = (_shardings(inputs.cache), _shardings(inputs.rows), inputs.replicated, inputs.replicated)
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=outputs)
    return jitted.trace(inputs.params, inputs.cache, inputs.rows, packed)


def compile_sample(model: StepModel, inputs: ProgramInputs, rows: int, variant: SampleVariant) -> Any:
    """Compiles one sample program of one row bucket."""
    selected = _selected(model, inputs, rows)
    if variant <= SampleVariant.RANDOM:
        step = functools.partial(choose_tokens, model=model, greedy=variant is SampleVariant.GREEDY)
        jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(_shardings(inputs.rows), inputs.replicated))
        return jitted.lower(inputs.rows, selected).compile()
    outputs = _shardings(inputs.rows), _shardings(inputs.sampler), inputs.replicated
    masks = inputs.spec((rows, mask_words(model)), jnp.uint32) if variant is SampleVariant.MASKED else None
    step = functools.partial(choose_shaped_tokens, model=model)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs)
    return jitted.lower(inputs.rows, inputs.sampler, selected, masks).compile()


def compile_score(model: StepModel, inputs: ProgramInputs, rows: int, max_logprobs: int) -> Any:
    """Compiles the log-probabilities of one row bucket's tokens."""
    step = functools.partial(score_step, model=model, max_logprobs=max_logprobs)
    jitted = jax.jit(step, out_shardings=inputs.replicated)
    return jitted.lower(_selected(model, inputs, rows), inputs.spec((rows,), jnp.int32)).compile()


def compile_score_prompt(model: StepModel, inputs: ProgramInputs, bucket: Bucket, max_logprobs: int) -> Any:
    """Compiles the log-probabilities of the prompt tokens of one mixed bucket."""
    most = min(limit_prompt_logprobs(max_logprobs), model.config.vocab_size)
    step = functools.partial(score_prompt_tokens, model=model, max_logprobs=most)
    hidden = inputs.spec((bucket.tokens, model.config.hidden_size), model.config.dtype)
    jitted = jax.jit(step, out_shardings=inputs.replicated)
    return jitted.lower(head_params(inputs.params), hidden, inputs.spec((bucket.tokens,), jnp.int32)).compile()


def compile_pool(model: StepModel, inputs: ProgramInputs, rows: int) -> Any:
    """Compiles the embeddings of one row bucket."""
    jitted = jax.jit(functools.partial(pool_last, model=model), out_shardings=inputs.replicated)
    last = inputs.spec((rows, model.config.hidden_size), model.config.dtype)
    return jitted.lower(inputs.params["final_norm"], last).compile()


def compile_set_row(model: StepModel, inputs: ProgramInputs) -> Any:
    """Compiles what writes one row's line of the sampler's state."""
    line = make_row_setting(model.config.vocab_size, (), ())
    line = jax.tree.map(lambda array: inputs.spec(array.shape, array.dtype), line)
    jitted = jax.jit(set_row, donate_argnums=(0,), out_shardings=_shardings(inputs.sampler))
    return jitted.lower(inputs.sampler, inputs.spec((), jnp.int32), line).compile()


def mask_words(model: StepModel) -> int:
    """32-bit words of a mask of all tokens."""
    return -(-model.config.vocab_size // WORD_BITS)


def compile_programs(
    model: StepModel,
    inputs: ProgramInputs,
    buckets: BucketTable,
    *,
    max_logprobs: int,
    threads: int = 0,
    progress: Progress | None = None,
    known: Programs | None = None,
) -> Programs:
    """Returns every program of the table: those in `known`, and the others compiled.

    Several are compiled at once: XLA works outside the interpreter's lock.
    """
    threads = threads or min(8, os.cpu_count() or 1)
    programs = Programs() if known is None else known.copy()
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        jobs = {
            pool.submit(compile_one): (name, table, key)
            for name, table, key, compile_one in _list_jobs(programs, model, inputs, buckets, max_logprobs)
            if key not in table
        }
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                name, table, key = jobs[job]
                table[key] = job.result()
                if progress is not None:
                    progress(name, done, len(jobs))
        except BaseException:  # Ctrl-C, or a program that does not compile: nobody waits for those not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return programs


_Job = tuple[str, dict[Any, Any], Any, Callable[[], Any]]  # (name for users, where it belongs, its key there, compile)


def _list_jobs(
    programs: Programs, model: StepModel, inputs: ProgramInputs, buckets: BucketTable, max_logprobs: int
) -> Iterator[_Job]:
    bind = functools.partial
    for bucket in sorted(buckets.buckets, reverse=True):  # the longest first
        yield str(bucket), programs.forward, bucket, bind(compile_forward, model, inputs, bucket)
        if not bucket.is_decode:
            compile_one = bind(compile_score_prompt, model, inputs, bucket, max_logprobs)
            yield f"score prompt {bucket.tokens}", programs.score_prompt, bucket, compile_one
    for rows in buckets.row_counts:
        for variant in SampleVariant:
            compile_one = bind(compile_sample, model, inputs, rows, variant)
            yield f"sample {rows} {variant.name.lower()}", programs.sample, (rows, variant), compile_one
        yield f"score {rows}", programs.score, rows, bind(compile_score, model, inputs, rows, max_logprobs)
        yield f"pool {rows}", programs.pool, rows, bind(compile_pool, model, inputs, rows)
    yield "set row", programs.set_row, None, bind(compile_set_row, model, inputs)


def _selected(model: StepModel, inputs: ProgramInputs, rows: int) -> SampleInputs:
    """What a forward program of `rows` rows hands over."""
    layout = InputLayout(Bucket(rows, rows), inputs.state_shape)
    return SampleInputs(
        logits=inputs.spec((rows, model.config.vocab_size), jnp.float32),
        row_ids=inputs.spec((rows,), jnp.int32),
        samples=inputs.spec((rows,), jnp.int32),
        sampling=inputs.spec(layout.views(layout.new()).sampling.shape, jnp.int32),
    )


def _shardings(specs: Any) -> Any:
    return jax.tree.map(lambda spec: spec.sharding, specs)
