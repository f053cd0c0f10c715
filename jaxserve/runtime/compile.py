"""Compiles the closed set of programs before the engine is ready."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxserve.runtime.buckets import Bucket, BucketTable
from jaxserve.runtime.inputs import InputLayout, StateShape
from jaxserve.runtime.runner import Programs
from jaxserve.runtime.state import KVCache, RowState
from jaxserve.runtime.step import SampleInputs, StepModel, choose_tokens, forward

Progress = Callable[[str, int, int], None]  # (what was done, how many, of how many)


@dataclass(frozen=True)
class ProgramInputs:
    """Abstract values of everything the programs take."""

    params: Any
    cache: KVCache
    rows: RowState
    state_shape: StateShape
    replicated: Sharding


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
    layout = InputLayout(bucket, inputs.state_shape)
    step = functools.partial(forward, model=model, layout=layout)
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=inputs.replicated)
    outputs = (_shardings(inputs.cache), _shardings(inputs.rows), inputs.replicated)
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=outputs)
    return jitted.lower(inputs.params, inputs.cache, inputs.rows, packed).compile()


def compile_sample(model: StepModel, inputs: ProgramInputs, rows: int, greedy: bool) -> Any:
    """Compiles the plain (greedy) or the full sample program of one row bucket."""
    step = functools.partial(choose_tokens, model=model, greedy=greedy)
    layout = InputLayout(Bucket(rows, rows), inputs.state_shape)
    sampling = layout.views(layout.new()).sampling

    def spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=inputs.replicated)

    selected = SampleInputs(
        logits=spec((rows, model.config.vocab_size), jnp.float32),
        row_ids=spec((rows,), jnp.int32),
        samples=spec((rows,), jnp.int32),
        sampling=spec(sampling.shape, jnp.int32),
    )
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(_shardings(inputs.rows), inputs.replicated))
    return jitted.lower(inputs.rows, selected).compile()


def compile_programs(
    model: StepModel, inputs: ProgramInputs, buckets: BucketTable, *, threads: int = 0, progress: Progress | None = None
) -> Programs:
    """Compiles every program of the table, several at once: XLA works outside the interpreter's lock."""
    threads = threads or min(8, os.cpu_count() or 1)
    programs = Programs({}, {})
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        jobs = {}
        for bucket in sorted(buckets.buckets, reverse=True):  # the longest first
            jobs[pool.submit(compile_forward, model, inputs, bucket)] = programs.forward, bucket, str(bucket)
        for rows in buckets.row_counts:
            for greedy in (True, False):
                name = f"sample {rows} {'plain' if greedy else 'full'}"
                job = pool.submit(compile_sample, model, inputs, rows, greedy)
                jobs[job] = programs.sample, (rows, greedy), name
        for done, job in enumerate(as_completed(jobs), 1):
            table, key, name = jobs[job]
            table[key] = job.result()
            if progress is not None:
                progress(name, done, len(jobs))
    return programs


def _shardings(specs: Any) -> Any:
    return jax.tree.map(lambda spec: spec.sharding, specs)
