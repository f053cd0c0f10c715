"""Compiles programs: a whole table before the engine is ready, or one when a step needs it."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Sharding

from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.device_state import KVCache, RowState, make_zeros
from jaxserve.runtime.drafting import look_up_drafts
from jaxserve.runtime.heads import draft_tokens
from jaxserve.runtime.inputs import InputLayout, StateShape
from jaxserve.runtime.page_copies import COPY_PAGES, HostMemory, read_pages, write_pages
from jaxserve.runtime.program_list import ProgramKey, name_program
from jaxserve.runtime.programs import Programs
from jaxserve.runtime.rows import NUM_SAMPLING_FIELDS, SampleVariant
from jaxserve.runtime.sample import sample_shaped_tokens, sample_tokens
from jaxserve.runtime.step import (
    compute_prompt_logprobs,
    compute_step_logprobs,
    decode_loop,
    forward,
    head_params,
    pool_last,
)
from jaxserve.runtime.step_model import RowLines, SampleInputs, StepModel
from jaxserve.sampling import SamplerState, make_row_setting, set_row
from jaxserve.sampling.sampler_state import WORD_BITS
from jaxserve.sampling_params import limit_prompt_logprobs
from jaxserve.speculation import LookupState, answer_block_specs, measure_block, row_block_specs

Progress = Callable[[str, int, int], None]  # (what was done, how many, of how many)


@dataclass(frozen=True)
class ProgramInputs:
    """Abstract values of the programs' arguments."""

    params: Any
    draft_params: Any  # None: no drafter has weights
    cache: KVCache
    rows: RowState
    sampler: SamplerState
    lookup: LookupState | None  # None: no drafts are looked up
    state_shape: StateShape
    replicated: Sharding
    host_memory: HostMemory
    options: Mapping[str, Any] = field(default_factory=dict)  # of the compiler, for devices that are not here

    def spec(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the abstract value of an array that is replicated on all devices."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    @property
    def history(self) -> Any:
        """The tokens of the rows in which drafts are looked up."""
        return None if self.lookup is None else self.lookup.history

    @property
    def corpus(self) -> Any:
        """The finished answers in which drafts are looked up."""
        return None if self.lookup is None else self.lookup.corpus


_log = logging.getLogger(__name__)
_NOTICEABLE = 0.5  # seconds; users are told of compilations that take as long, which cached programs do not
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # also sent when the persistent cache has the program


@functools.cache  # one listener per process
def watch_compiles() -> Callable[[], int]:
    """Returns a function that counts the process's XLA compilations since the first `watch_compiles`, cached or not."""
    count = 0

    def listen(event: str, seconds: float, **_: Any) -> None:
        nonlocal count
        del seconds
        if event == _COMPILE_EVENT:
            count += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: count


def compile_forward(model: StepModel, inputs: ProgramInputs, bucket: Bucket) -> Any:
    """Compiles the forward program of one bucket."""
    return trace_forward(model, inputs, bucket).lower().compile()


def trace_forward(model: StepModel, inputs: ProgramInputs, bucket: Bucket) -> Any:
    """Traces the forward program of one bucket, for the caller to lower for any platform."""
    layout = InputLayout(bucket, inputs.state_shape)
    step = functools.partial(forward, model=model, layout=layout)
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=inputs.replicated)
    outputs = (_shardings(inputs.cache), _shardings(inputs.rows), inputs.replicated, inputs.replicated)
    options = _list_options(model, inputs)
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=outputs, compiler_options=options)
    return jitted.trace(inputs.params, inputs.cache, inputs.rows, packed, inputs.draft_params)


def _list_options(model: StepModel, inputs: ProgramInputs) -> dict[str, Any] | None:
    """Returns the compiler's options for a program with products; for a GPU they name passes of XLA to leave out.

    Rematerialization counts each update of the donated pool as a copy. So every step seems not to fit, and it runs 36
    kernels of an 8B decode step again, the first layer's qkv product among them, to save 7 MB (jax 0.11.2 and
    0.12.0.1). The slice-sinker would convert the quantized matrices of all layers to 16 bits in front of the first (jax
    0.12.0.1): 270 MB for eight layers of 17 MB each.
    """
    mesh = getattr(inputs.replicated, "mesh", None)
    if isinstance(mesh, AbstractMesh) or next(iter(inputs.replicated.device_set)).platform not in ("gpu", "cuda"):
        return None
    passes = ["rematerialization", *(["slice-sinker"] if model.config.quantization is not None else [])]
    return {"xla_disable_hlo_passes": ",".join(passes), **inputs.options}


def compile_sample(model: StepModel, inputs: ProgramInputs, rows: int, width: int, variant: SampleVariant) -> Any:
    """Compiles one sample program of rows of `width` tokens."""
    selected, corpus = _selected(model, inputs, rows, width), inputs.corpus if width > 1 else None
    kept = _shardings(inputs.rows), _shardings(inputs.history)
    if variant <= SampleVariant.RANDOM:
        step: Callable[..., Any] = functools.partial(sample_tokens, model=model, greedy=variant is SampleVariant.GREEDY)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*kept, inputs.replicated))
        return jitted.lower(inputs.rows, inputs.history, corpus, selected).compile()
    outputs = *kept, _shardings(inputs.sampler), inputs.replicated
    lines = rows * width, mask_words(model)
    masks = inputs.spec(lines, jnp.uint32) if variant is SampleVariant.MASKED else None
    step = functools.partial(sample_shaped_tokens, model=model)
    jitted = jax.jit(step, donate_argnums=(0, 1, 3), out_shardings=outputs)
    return jitted.lower(inputs.rows, inputs.history, corpus, inputs.sampler, selected, masks).compile()


def compile_draft(model: StepModel, inputs: ProgramInputs, rows: int) -> Any:
    """Compiles the program with which a drafter with weights drafts behind a step of so many rows."""
    step = functools.partial(draft_tokens, model=model)
    outputs = _shardings(inputs.cache), _shardings(inputs.rows), inputs.replicated
    options = _list_options(model, inputs)
    jitted = jax.jit(step, donate_argnums=(2, 3), out_shardings=outputs, compiler_options=options)
    arguments = head_params(inputs.params), inputs.draft_params, inputs.cache, inputs.rows
    return jitted.lower(*arguments, _lines(inputs, rows)).compile()


def compile_loop(model: StepModel, inputs: ProgramInputs, rows: int, variant: SampleVariant, *, num_steps: int) -> Any:
    """Compiles `num_steps` decode steps of one row bucket."""
    layout = InputLayout(Bucket(rows, rows), inputs.state_shape)
    loop = functools.partial(decode_loop, model=model, layout=layout, num_steps=num_steps, variant=variant)
    packed = inputs.spec((layout.size,), jnp.int32)
    state = inputs.cache, inputs.rows, inputs.sampler
    outputs = *map(_shardings, state), inputs.replicated
    options = _list_options(model, inputs)
    jitted = jax.jit(loop, donate_argnums=(1, 2, 3), out_shardings=outputs, compiler_options=options)
    return jitted.lower(inputs.params, *state, packed).compile()


def compile_logprobs(model: StepModel, inputs: ProgramInputs, rows: int, width: int, max_logprobs: int) -> Any:
    """Compiles the log-probabilities of sampled tokens for rows of `width` tokens; `max_logprobs` -1: of all tokens."""
    most = min(max_logprobs, model.config.vocab_size)
    step = functools.partial(compute_step_logprobs, model=model, max_logprobs=most)
    jitted = jax.jit(step, out_shardings=inputs.replicated)
    ids = inputs.spec((rows, width), jnp.int32)
    return jitted.lower(_selected(model, inputs, rows, width), ids).compile()


def compile_prompt_logprobs(model: StepModel, inputs: ProgramInputs, bucket: Bucket, max_logprobs: int) -> Any:
    """Compiles the log-probabilities of prompt tokens for one mixed bucket."""
    most = min(limit_prompt_logprobs(max_logprobs), model.config.vocab_size)
    step = functools.partial(compute_prompt_logprobs, model=model, max_logprobs=most)
    hidden = inputs.spec((bucket.tokens, model.config.hidden_size), model.config.dtype)
    jitted = jax.jit(step, out_shardings=inputs.replicated, compiler_options=_list_options(model, inputs))
    return jitted.lower(head_params(inputs.params), hidden, inputs.spec((bucket.tokens,), jnp.int32)).compile()


def compile_pool(model: StepModel, inputs: ProgramInputs, rows: int) -> Any:
    """Compiles the embeddings program of one row bucket."""
    jitted = jax.jit(functools.partial(pool_last, model=model), out_shardings=inputs.replicated)
    last = inputs.spec((rows, model.config.hidden_size), model.config.dtype)
    return jitted.lower(inputs.params["final_norm"], last).compile()


def compile_set_row(model: StepModel, inputs: ProgramInputs) -> Any:
    """Compiles the program that writes one row of the sampler's state."""
    line = make_row_setting(model.config.vocab_size, (), ())
    line = jax.tree.map(lambda array: inputs.spec(array.shape, array.dtype), line)
    jitted = jax.jit(set_row, donate_argnums=(0,), out_shardings=_shardings(inputs.sampler))
    return jitted.lower(inputs.sampler, inputs.spec((), jnp.int32), line).compile()


def compile_zeros(inputs: ProgramInputs) -> Any:
    """Compiles the program that makes the state of an idle engine: empty pools, rows without work."""
    specs = inputs.cache, inputs.rows, inputs.sampler, inputs.lookup
    return jax.jit(functools.partial(make_zeros, specs), out_shardings=_shardings(specs)).lower().compile()


def compile_look_up(model: StepModel, inputs: ProgramInputs, rows: int) -> Any:
    """Compiles the program that looks drafts up behind a step of width 1."""
    assert inputs.lookup is not None
    ids = inputs.spec((rows, 1), jnp.int32)
    step = functools.partial(look_up_drafts, model=model)
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(_shardings(inputs.rows), inputs.replicated))
    return jitted.lower(inputs.rows, inputs.lookup, _lines(inputs, rows), ids).compile()


def compile_write_rows(model: StepModel, inputs: ProgramInputs) -> Any:
    """Compiles the program that writes tokens of rows to where drafts are looked up."""
    assert model.drafting is not None and model.drafting.lookup is not None and inputs.lookup is not None
    line = inputs.spec((measure_block(row_block_specs(inputs.history.shape[0])),), jnp.int32)
    jitted = jax.jit(model.drafting.lookup.write_rows, donate_argnums=(0,), out_shardings=_shardings(inputs.lookup))
    return jitted.lower(inputs.lookup, line).compile()


def compile_write_answers(model: StepModel, inputs: ProgramInputs) -> Any:
    """Compiles the program that writes finished answers to where drafts are looked up."""
    assert model.drafting is not None and model.drafting.lookup is not None and inputs.state_shape.corpus is not None
    line = inputs.spec((measure_block(answer_block_specs(inputs.state_shape.corpus)),), jnp.int32)
    step = model.drafting.lookup.write_answers
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=_shardings(inputs.corpus))
    return jitted.lower(inputs.corpus, line).compile()


def compile_read_pages(model: StepModel, inputs: ProgramInputs, group: int) -> Any:
    """Compiles the program that reads pages of a KV group, to be saved on the host."""
    page = inputs.host_memory.pages[group]
    step = functools.partial(read_pages, pool=model.layout.pools[group], offsets=model.layout.list_offsets(group))
    jitted = jax.jit(step, out_shardings=page.sharding)
    return jitted.lower(inputs.cache, inputs.spec((COPY_PAGES,), jnp.int32)).compile()


def compile_write_pages(model: StepModel, inputs: ProgramInputs, group: int) -> Any:
    """Compiles the program that writes pages of a KV group, loaded from the host."""
    step = functools.partial(write_pages, pool=model.layout.pools[group], offsets=model.layout.list_offsets(group))
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=_shardings(inputs.cache))
    pages = (inputs.host_memory.pages[group],) * COPY_PAGES
    return jitted.lower(inputs.cache, inputs.spec((COPY_PAGES,), jnp.int32), pages).compile()


def mask_words(model: StepModel) -> int:
    """Returns the number of 32-bit words in a mask over the vocabulary."""
    return -(-model.config.vocab_size // WORD_BITS)


@dataclass(frozen=True)
class ProgramCompiler:
    """Compiles any program of one engine."""

    model: StepModel
    inputs: ProgramInputs
    max_logprobs: int
    max_decode_steps: int = 1
    trace: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which kernels see devices that are not here

    def compile(self, kind: str, key: Any) -> Any:
        """Returns the compiled program of a kind and key of `Programs`; ValueError for an unknown kind."""
        compilers: dict[str, Callable[[StepModel, ProgramInputs, Any], Any]] = {
            "forward": compile_forward,
            "sample": lambda model, inputs, key: compile_sample(model, inputs, *key),
            "loop": lambda model, inputs, key: compile_loop(model, inputs, *key, num_steps=self.max_decode_steps),
            "logprobs": lambda model, inputs, key: compile_logprobs(model, inputs, *key, self.max_logprobs),
            "prompt_logprobs": functools.partial(compile_prompt_logprobs, max_logprobs=self.max_logprobs),
            "pool": compile_pool,
            "set_row": lambda model, inputs, _: compile_set_row(model, inputs),
            "zeros": lambda model, inputs, _: compile_zeros(inputs),
            "draft": compile_draft,
            "look_up": compile_look_up,
            "write_rows": lambda model, inputs, _: compile_write_rows(model, inputs),
            "write_answers": lambda model, inputs, _: compile_write_answers(model, inputs),
            "read_pages": compile_read_pages,
            "write_pages": compile_write_pages,
        }
        if kind not in compilers:
            raise ValueError(f"kind: there are no {kind!r} programs")
        with self.trace():  # entered anew: a context is its thread's
            return compilers[kind](self.model, self.inputs, key)


def compile_programs(
    make: Callable[[str, Any], Any],
    wanted: Iterable[ProgramKey],
    *,
    threads: int = 0,
    progress: Progress | None = None,
    known: Programs | None = None,
) -> Programs:
    """Returns the programs in `known` and in `wanted`. XLA releases the GIL, so missing ones compile in threads.

    Args:
        make: compiles, or loads, the program of a kind and key.
        threads: how many compile at once; 0: one per core, at most 8.
    """
    threads = threads or min(8, os.cpu_count() or 1)
    programs = Programs() if known is None else known.copy()
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        jobs = {pool.submit(make, kind, key): (kind, key) for kind, key in wanted if key not in getattr(programs, kind)}
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                kind, key = jobs[job]
                getattr(programs, kind)[key] = job.result()
                if progress is not None:
                    progress(name_program(kind, key), done, len(jobs))
        except BaseException:  # Ctrl-C, or a program that does not compile: drop those not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return programs


def compile_late(compiler: ProgramCompiler, announce: Callable[[str], None]) -> Callable[[str, Any], Any]:
    """Returns a `Programs.compile_missing` that compiles a program, logs it, and announces it if it took long."""

    def compile_missing(kind: str, key: Any) -> Any:
        start = time.perf_counter()
        program = compiler.compile(kind, key)
        seconds = time.perf_counter() - start
        _log.info("compiled %s in %.1f s", name_program(kind, key), seconds)
        if seconds >= _NOTICEABLE:
            announce(f"compiled {name_program(kind, key)} in {seconds:.1f} s: a step needed it")
        return program

    return compile_missing


def _selected(model: StepModel, inputs: ProgramInputs, rows: int, width: int) -> SampleInputs:
    """Returns the abstract values that a forward program of `rows` rows hands to sampling."""
    count, aux = rows * width, inputs.rows.aux
    return SampleInputs(
        logits=inputs.spec((count, model.config.vocab_size), jnp.float32),
        lines=_lines(inputs, rows),
        aux=None if aux is None or width == 1 else inputs.spec((count, aux.shape[1]), aux.dtype),
    )


def _lines(inputs: ProgramInputs, rows: int) -> RowLines:
    return RowLines(inputs.spec((rows, 2 + NUM_SAMPLING_FIELDS), jnp.int32))


def _shardings(specs: Any) -> Any:
    return jax.tree.map(lambda spec: spec.sharding, specs)
