"""The programs that every engine has: their kinds, what they are made of, and their names for users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.runtime.device_state import make_zeros
from jaxserve.core.runtime.inputs import InputLayout
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.programs import Program, ProgramKey
from jaxserve.core.runtime.rows import SampleVariant
from jaxserve.core.runtime.sample import sample_tokens
from jaxserve.core.runtime.states import settle
from jaxserve.core.runtime.step import (
    compute_prompt_logprobs,
    compute_step_logprobs,
    decode_loop,
    embed,
    embedding_params,
    forward,
    head_params,
)
from jaxserve.core.runtime.step_arrays import SelectedLines
from jaxserve.core.runtime.step_model import StepModel
from jaxserve.core.sampling import make_row_setting, set_row
from jaxserve.sampling_params import limit_prompt_logprobs


def name_program(kind: str, key: Any) -> str:
    """Returns a program's name for users."""
    name = kind.replace("_", " ")
    match kind, key:
        case "forward", bucket:
            name = str(bucket)
        case "sample", (rows, width, variant):
            name += f" {rows if width == 1 else f'{rows}x{width}'} {variant.name.lower()}"
        case "loop", (bucket, variant):
            form = f" adapters {bucket.adapters}" if bucket.adapters else ""
            name += f" {bucket.rows} {variant.name.lower()}{form}"
        case "logprobs", (rows, width):
            name += f" {rows * width}"
        case "settle", (rows, width):
            name += f" {rows}x{width}"
        case _ if key is not None:
            name += f" {key}"
    return name


def list_programs(
    buckets: BucketTable,
    variants: Iterable[SampleVariant] = SampleVariant,
    *,
    embeds_tokens: bool = False,
    keeps_states: bool = False,
) -> Iterator[ProgramKey]:
    """Yields the (kind, key) of every program of a table but loops, the slowest to compile first.

    Without `variants` no step samples, and there are no logits. `embeds_tokens`: each token has a vector of its own.
    `keeps_states`: layers have recurrent states.
    """
    variants = tuple(variants)
    for bucket in sorted(buckets.buckets, reverse=True):
        yield "forward", bucket
    for tokens in reversed(buckets.token_counts if variants else ()):
        yield "prompt_logprobs", tokens
    for size in buckets.verify_sizes if keeps_states else ():
        yield "settle", size
    for rows, width in (*((rows, 1) for rows in buckets.row_counts), *buckets.verify_sizes):
        for variant in variants:
            yield "sample", (rows, width, variant)
        if variants:
            yield "logprobs", (rows, width)
    for count in sorted({bucket.tokens for bucket in buckets.buckets}) if embeds_tokens else buckets.row_counts:
        yield "embed", count
    yield "set_row", None
    yield "zeros", None


def list_loops(buckets: BucketTable) -> Iterator[ProgramKey]:
    """Yields the (kind, key) of the programs of several decode steps."""
    for bucket in buckets.buckets:
        if bucket.is_decode and bucket.rows <= buckets.loop_rows:
            yield from (("loop", (bucket, variant)) for variant in SampleVariant if variant is not SampleVariant.MASKED)


@dataclass(frozen=True)
class EnginePrograms:
    """The programs of one engine, to be compiled."""

    model: StepModel
    inputs: ProgramInputs
    max_logprobs: int
    max_decode_steps: int = 1

    def make(self, kind: str, key: Any) -> Program:
        """Returns the program of a kind and key; ValueError for a kind that there is not."""
        if kind in _MAKERS:
            return _MAKERS[kind](self, key)
        own = zip(self.model.features, self.inputs.feature_state, self.inputs.feature_params, strict=True)
        for feature, state, params in own:
            program = feature.make_program(kind, key, self.inputs, state, params)
            if program is not None:
                return program
        raise ValueError(f"kind: there are no {kind!r} programs")

    def select(self, rows: int, width: int) -> SelectedLines:
        """Returns the abstract values that a forward program of `rows` rows hands to sampling."""
        count, inputs = rows * width, self.inputs
        handed = (None if width == 1 else each.handed_specs(count) for each in self.model.features)
        return SelectedLines(
            logits=inputs.spec((count, self.model.config.vocab_size), jnp.float32),
            lines=inputs.lines(rows),
            handed=jax.tree.map(lambda spec: inputs.spec(spec.shape, spec.dtype), tuple(handed)),
        )

    def select_params(self, bucket: Bucket) -> tuple[Any, ...]:
        """Returns the abstract values of the features' parameters that the forward programs of a bucket read."""
        pairs = zip(self.model.features, self.inputs.feature_params, strict=True)
        return tuple(feature.select_params(params, bucket) for feature, params in pairs)

    def sample_state(self, width: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the abstract values of what each feature gives a sample program, see `StepFeature.split_state`."""
        pairs = zip(self.model.features, self.inputs.feature_state, strict=True)
        both = [feature.split_state(state, width) for feature, state in pairs]
        return tuple(kept for kept, _ in both), tuple(read for _, read in both)


def _make_forward(engine: EnginePrograms, bucket: Bucket) -> Program:
    inputs, layout = engine.inputs, InputLayout(bucket, engine.inputs.state_shape)
    packed = inputs.spec((layout.size,), jnp.int32)
    return Program(
        partial(forward, model=engine.model, layout=layout),
        (inputs.params, inputs.cache, inputs.rows, packed, engine.select_params(bucket)),
        results=(inputs.replicated, inputs.replicated),
        donated=(1, 2),
        has_products=True,
    )


def _make_sample(engine: EnginePrograms, key: tuple[int, int, SampleVariant]) -> Program:
    (rows, width, variant), inputs = key, engine.inputs
    is_shaped = variant > SampleVariant.RANDOM
    words = inputs.sampler.allowed.shape[1]
    mask = inputs.spec((rows * width, words), jnp.uint32) if variant is SampleVariant.MASKED else None
    kept, read = engine.sample_state(width)
    return Program(
        partial(sample_tokens, model=engine.model, variant=variant),
        (inputs.rows, kept, inputs.sampler if is_shaped else None, read, engine.select(rows, width), mask),
        results=(inputs.replicated,),
        donated=(0, 1, 2),
    )


def _make_settle(engine: EnginePrograms, size: tuple[int, int]) -> Program:
    """Lets recurrent states follow what a verify step left its rows."""
    (rows, width), inputs = size, engine.inputs
    layout = InputLayout(Bucket(rows * width, rows, width), inputs.state_shape)
    arguments = inputs.spec((layout.size,), jnp.int32), inputs.spec((rows, width), jnp.int32)
    return Program(
        partial(settle, model=engine.model, layout=layout),
        (inputs.params, inputs.cache, inputs.rows, *arguments),
        donated=(1,),
        has_products=True,  # of states
    )


def _make_loop(engine: EnginePrograms, key: tuple[Bucket, SampleVariant]) -> Program:
    (bucket, variant), inputs = key, engine.inputs
    layout, steps = InputLayout(bucket, inputs.state_shape), engine.max_decode_steps
    packed = inputs.spec((layout.size,), jnp.int32)
    return Program(
        partial(decode_loop, model=engine.model, layout=layout, num_steps=steps, variant=variant),
        (inputs.params, inputs.cache, inputs.rows, inputs.sampler, packed, engine.select_params(bucket)),
        results=(inputs.replicated,),
        donated=(1, 2, 3),
        has_products=True,
    )


def _make_logprobs(engine: EnginePrograms, key: tuple[int, int]) -> Program:
    most = min(engine.max_logprobs, engine.model.config.vocab_size)  # -1: of all tokens
    return Program(
        partial(compute_step_logprobs, model=engine.model, max_logprobs=most),
        (engine.select(*key), engine.inputs.spec(key, jnp.int32)),
        results=(engine.inputs.replicated,),
    )


def _make_prompt_logprobs(engine: EnginePrograms, tokens: int) -> Program:
    inputs, config = engine.inputs, engine.model.config
    most = min(limit_prompt_logprobs(engine.max_logprobs), config.vocab_size)
    hidden = inputs.spec((tokens, config.hidden_size), config.dtype)
    return Program(
        partial(compute_prompt_logprobs, model=engine.model, max_logprobs=most),
        (head_params(inputs.params), hidden, inputs.spec((tokens,), jnp.int32)),
        results=(inputs.replicated,),
        has_products=True,
    )


def _make_embed(engine: EnginePrograms, count: int) -> Program:
    inputs, config = engine.inputs, engine.model.config
    size = config.pooler.count_pooled(config.hidden_size)
    last = inputs.spec((count, size), jnp.float32 if engine.model.pools_rows else config.dtype)
    arguments = embedding_params(inputs.params), last
    return Program(partial(embed, model=engine.model), arguments, results=(inputs.replicated,))


def _make_set_row(engine: EnginePrograms, _: None) -> Program:
    """Writes one row of the sampler's state."""
    inputs, line = engine.inputs, make_row_setting(engine.model.config.vocab_size, (), ())
    line = jax.tree.map(lambda array: inputs.spec(array.shape, array.dtype), line)
    return Program(set_row, (inputs.sampler, inputs.spec((), jnp.int32), line), donated=(0,))


def _make_zeros(engine: EnginePrograms, _: None) -> Program:
    """Makes the state of an idle engine: empty pools, rows without work."""
    inputs = engine.inputs
    specs = inputs.cache, inputs.rows, inputs.sampler, inputs.feature_state
    return Program(partial(make_zeros, specs), (), results=(jax.tree.map(lambda spec: spec.sharding, specs),))


_MAKERS: Mapping[str, Callable[[EnginePrograms, Any], Program]] = {
    "forward": _make_forward,
    "sample": _make_sample,
    "settle": _make_settle,
    "loop": _make_loop,
    "logprobs": _make_logprobs,
    "prompt_logprobs": _make_prompt_logprobs,
    "embed": _make_embed,
    "set_row": _make_set_row,
    "zeros": _make_zeros,
}
