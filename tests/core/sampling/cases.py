"""What the tests of sampling are fed with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core import sampling
from jaxserve.core.sampling import (
    RowSetting,
    SamplerState,
    SamplingInputs,
    draw_uniforms,
    make_row_setting,
    map_rows,
    sampler_state_specs,
    set_row,
)

DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed_low": np.uint32,
    "seed_high": np.uint32,
    "sequence_index": np.int32,
    "positions": np.int32,
    "presence": np.float32,
    "frequency": np.float32,
    "repetition": np.float32,
    "has_edits": np.int32,
}


# The functions of a row, as a step maps them over its rows.
def sample(logits: jax.Array, inputs: SamplingInputs, *, vocab_size: int) -> jax.Array:
    function = partial(sampling.sample, vocab_size=vocab_size)
    return map_rows(function, jnp.asarray(logits), inputs, draw_uniforms(inputs))[0]


def sample_greedy(logits: jax.Array, *, vocab_size: int | None = None) -> jax.Array:
    return map_rows(partial(sampling.sample_greedy, vocab_size=vocab_size), jnp.asarray(logits))[0]


def finite_rows(logits: jax.Array) -> jax.Array:
    return map_rows(sampling.is_finite, jnp.asarray(logits))


def mask_logits(logits: jax.Array, mask: jax.Array) -> jax.Array:
    return map_rows(sampling.mask_logits, jnp.asarray(logits), mask)


def shape_logits(
    logits: jax.Array, inputs: SamplingInputs, state: SamplerState, row_ids: jax.Array, *, vocab_size: int
) -> jax.Array:
    def shape(line: jax.Array, inputs: SamplingInputs, row_id: jax.Array) -> jax.Array:
        return sampling.shape_logits(line, inputs, state, row_id, vocab_size=vocab_size)

    return map_rows(shape, jnp.asarray(logits), inputs, row_ids)


@dataclass
class RowCase:
    """What one request asks of `shape_logits`, and its tokens so far."""

    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)
    min_tokens: int = 0
    presence: float = 0
    frequency: float = 0
    repetition: float = 1
    is_on: bool = True

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def setting(self, size: int) -> RowSetting:
        return make_row_setting(
            size,
            self.prompt,
            self.output,
            logit_bias=self.bias,
            allowed_ids=self.allowed,
            bad_words=self.bad_words,
            banned_ids=self.banned,
            banned_until=len(self.prompt) + self.min_tokens,
        )


def random_case(rng: np.random.Generator, size: int, *, exact: bool = True) -> RowCase:
    """A request that uses any number of features; `exact`: of values whose products float32 does not round."""

    def ids(most: int) -> list[int]:
        return rng.integers(0, size, rng.integers(0, most + 1)).tolist()

    def number(low: float, high: float) -> float:
        value = rng.uniform(low, high)
        return round(value * 8) / 8 if exact else float(np.float32(value))

    output = ids(12)
    words = [rng.integers(0, size, rng.integers(1, 9)).tolist() for _ in range(rng.integers(0, 4))]
    for length in range(1, min(len(output), 7) + 1):
        if rng.random() < 0.5:
            words.append([*output[-length:], int(rng.integers(0, size))])
    on = rng.random(5) < 0.6
    return RowCase(
        prompt=ids(20),
        output=output,
        bias={token: number(-8, 8) for token in ids(10)} if on[0] else {},
        allowed=ids(size) if on[1] else None,
        bad_words=words if on[2] else [],
        banned=ids(4),
        min_tokens=int(rng.integers(0, 16)),
        presence=number(-2, 2) if on[3] else 0,
        frequency=number(-2, 2) if on[3] else 0,
        repetition=(float(rng.choice([0.5, 1, 2, 4])) if exact else number(0.5, 2)) if on[4] else 1,
        is_on=rng.random() < 0.8,
    )


def stale_state(num_rows: int, size: int) -> SamplerState:
    """A state whose every line was used by another row before."""
    rng = np.random.default_rng(99)
    specs = sampler_state_specs(num_rows, size)

    def fill(spec: jax.ShapeDtypeStruct) -> jax.Array:
        if spec.dtype == np.float32:
            return jnp.asarray(rng.normal(size=spec.shape), jnp.float32).at[:, ::3].set(-jnp.inf)
        tokens = np.sort(rng.integers(0, size, spec.shape), axis=-1)  # as they always lie there
        return jnp.asarray(tokens, spec.dtype)

    return jax.tree.map(fill, specs)


_set_row = jax.jit(set_row, donate_argnums=0)


def make_state(cases: list[RowCase], row_ids: np.ndarray, num_rows: int, size: int) -> SamplerState:
    """Sets the rows of the cases that are on, and leaves the others' lines as they were."""
    state = stale_state(num_rows, size)
    for case, row in zip(cases, row_ids, strict=True):
        if case.is_on:
            state = _set_row(state, row, case.setting(size))
    return state


def case_columns(cases: list[RowCase]) -> dict[str, list[float]]:
    """The columns of `SamplingInputs` that the cases decide."""
    return {
        "presence": [case.presence for case in cases],
        "frequency": [case.frequency for case in cases],
        "repetition": [case.repetition for case in cases],
        "positions": [case.position for case in cases],
        "has_edits": [case.is_on for case in cases],
    }


def make_inputs(rows: int, **columns) -> SamplingInputs:
    columns = {"temperature": 1, "top_p": 1, "repetition": 1, "seed_low": np.arange(rows), **columns}
    return SamplingInputs(
        **{name: np.broadcast_to(np.asarray(columns.get(name, 0), dtype), rows) for name, dtype in DTYPES.items()}
    )


def mixed_inputs(rows: int, seed: int, **columns) -> SamplingInputs:
    rng = np.random.default_rng(seed)
    mixed = {
        "temperature": rng.choice([0, 0.3, 0.8, 1, 2.5], rows),
        "top_k": rng.choice([0, 0, 1, 20, 200], rows),
        "top_p": rng.choice([1, 1, 0.95, 0.5], rows),
        "min_p": rng.choice([0, 0, 0.05], rows),
        "seed_low": rng.integers(0, 2**32, rows),
        "seed_high": rng.integers(0, 2**31, rows),
        "sequence_index": rng.integers(0, 4, rows),
        "positions": rng.integers(0, 5000, rows),
    }
    return make_inputs(rows, **(mixed | columns))


def make_logits(rows: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, size)).astype(np.float32) * 4


def take(inputs: SamplingInputs, rows) -> SamplingInputs:
    return jax.tree.map(lambda column: column[rows], inputs)


def chi_square(ids: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean; tokens expected < 8 times are pooled."""
    expected = expected * len(ids)
    counts = np.bincount(ids, minlength=len(expected)).astype(float)
    common = expected >= 8
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    counts, expected = counts[(expected > 0) | (counts > 0)], expected[(expected > 0) | (counts > 0)]
    statistic = np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-9))
    freedom = max(len(counts) - 1, 1)
    return (statistic - freedom) / np.sqrt(2 * freedom)
