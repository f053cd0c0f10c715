"""The gated delta rule for TPUs (Pallas): the recurrence itself, token by token, on states in VMEM.

A step of the grid has some key heads and all rows. States come and go through a ring of buffers while others are
computed. Each token is a few operations on the 16 registers of a head's state. A row has the same bits wherever its
text is cut, and whatever stands beside it. (Products of chunks would have to be in full float32.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES, pad_row
from pallas_kernels.platform import traced_core_count
from pallas_kernels.recurrent.spec import RuleShape, RuleTokens, StateRows
from pallas_kernels.tpu.config import VMEM_LIMIT
from pallas_kernels.tpu.pages import Ref, Scalar, divide, wait_copy

_RING_BYTES = 6 << 20  # of states on their way
_LEAST_BUFFERS, _MOST_BUFFERS = 4, 16  # of the ring
_SCALARS_LIMIT = 512 << 10  # bytes of decays and betas in SMEM, which has 1 MiB
_DTYPES = ("float32", "bfloat16")


def find_obstacle(shape: RuleShape) -> str | None:
    """Why the kernel cannot run, in words for users."""
    if shape.rule != "delta":
        return "it has the delta rule alone"
    if shape.key_dim != LANES or shape.value_dim != LANES:
        return f"it needs heads of {LANES} x {LANES}, these are of {shape.key_dim} x {shape.value_dim}"
    if shape.state_dtype not in _DTYPES:
        return f"it keeps states of {' or '.join(_DTYPES)}, these are of {shape.state_dtype}"
    if _choose_heads(shape, 1) is None:
        return f"a step of {shape.num_tokens} tokens does not fit its memory: max_num_batched_tokens is too large"
    return None


def run(
    tokens: RuleTokens, pool: jax.Array, offset: int, rows: StateRows, shape: RuleShape, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `advance_states`; raises ValueError for what `find_obstacle` names."""
    obstacle = find_obstacle(shape)
    together = _choose_heads(shape, traced_core_count())
    if obstacle is not None or together is None:
        raise ValueError(f"the delta rule for TPUs cannot run: {obstacle}")
    group, steps = shape.group, shape.keys // together
    num_tokens = shape.num_tokens
    keys = jnp.stack([tokens.q, tokens.k]).transpose(2, 0, 3, 1)  # [K, 2, A, T]
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, 0), (0, -num_tokens % LANES)))
    scalars = jnp.concatenate(
        [
            jnp.exp(tokens.decay).reshape(num_tokens, shape.keys, group),
            tokens.beta.reshape(num_tokens, shape.keys, group),
            jnp.sum(tokens.q * tokens.k, axis=-1, keepdims=True),
        ],
        axis=-1,
    )
    num_scalars = scalars.shape[-1]
    scalars = scalars.swapaxes(0, 1).reshape(steps, 1, -1)  # the last two axes of a block must be tiles, or whole
    lengths = jnp.diff(rows.starts)
    used = jnp.max(jnp.where(lengths > 0, jnp.arange(1, len(lengths) + 1), 0))
    meta = jnp.stack([used, jnp.asarray(offset, jnp.int32)]).astype(jnp.int32)
    static = _Static(shape, together, num_scalars, pool.shape[1], _count_buffers(shape, together))
    state = (static.buffers, together * group, shape.key_dim, shape.value_dim)
    by_heads = partial(pl.BlockSpec, index_map=lambda step, *_: (step, 0, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    answers, pool = pl.pallas_call(
        partial(_run_heads, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(steps,),
            in_specs=[
                by_heads((None, 1, scalars.shape[2]), memory_space=pltpu.SMEM),
                pl.BlockSpec((together, *keys.shape[1:]), lambda step, *_: (step, 0, 0, 0)),
                by_heads((together * group, num_tokens, LANES)),
                in_hbm,
            ],
            out_specs=[by_heads((together * group, num_tokens, LANES)), in_hbm],
            scratch_shapes=[
                pltpu.VMEM(state, pool.dtype),
                pltpu.SemaphoreType.DMA((static.buffers,)),
                pltpu.SemaphoreType.DMA((static.buffers,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((shape.heads, num_tokens, LANES), jnp.float32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True
        ),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        name="delta_rule",
    )(meta, rows.starts, rows.read, rows.write, scalars, keys, tokens.v.swapaxes(0, 1), pool)
    return answers.swapaxes(0, 1), pool


@dataclass(frozen=True)
class _Static:
    """The static parameters of the kernel."""

    shape: RuleShape
    together: int  # key heads of a step of the grid
    scalars: int  # of a token and key head
    slots: int  # R
    buffers: int  # of the ring


def _run_heads(
    static: _Static,
    meta: Ref,
    starts: Ref,
    read: Ref,
    write: Ref,
    scalars: Ref,  # [1, heads * T * scalars]
    keys: Ref,  # [heads, 2, A, T], queries and keys
    values: Ref,  # [heads * r, T, B]
    _: Ref,
    answers: Ref,  # [heads * r, T, B]
    pool: Ref,  # [L, R, N, A, B], HBM
    states: Ref,  # [buffers, heads * r, A, B]
    arrived: Ref,
    left: Ref,
) -> None:
    """Takes the states of some heads through all rows."""
    count, buffers = meta[0], static.buffers
    ring = _Ring(static, pool.at[meta[1]], states, (starts, read, write), (arrived, left))
    answers[...] = jnp.zeros(answers.shape, answers.dtype)
    lax.fori_loop(0, jnp.minimum(buffers - 2, count), lambda row, _: ring.fetch(row), None)

    def run_row(row: jax.Array, carry: int) -> int:
        # The state that leaves this buffer has had the time of a row.
        pl.when(row >= 2)(lambda: ring.await_write(row - 2))
        pl.when(row + buffers - 2 < count)(lambda: ring.fetch(row + buffers - 2))
        ring.await_read(row)
        _run_tokens(
            static, (starts[row], starts[row + 1]), scalars, (keys, values, answers), states.at[lax.rem(row, buffers)]
        )
        ring.store(row)
        return carry

    lax.fori_loop(0, count, run_row, 0)
    for back in (2, 1):
        pl.when(count >= back)(partial(ring.await_write, count - back))


def _run_tokens(
    static: _Static, span: tuple[Scalar, Scalar], scalars: Ref, tokens: tuple[Ref, Ref, Ref], states: Ref
) -> None:
    """Takes a row's states [heads * r, A, B] through its tokens."""
    shape, (keys, values, answers) = static.shape, tokens
    beside = 2 - static.together % 2  # heads whose steps fill each other's gaps

    def run_heads(index: jax.Array, carry: int) -> int:
        heads = [index * beside + each for each in range(beside)]

        def run_token(token: jax.Array, carry: int) -> int:
            block = pl.ds(pl.multiple_of(divide(token, LANES) * LANES, LANES), LANES)
            lane, row = jnp.full((LANES, LANES), token & (LANES - 1)), pl.ds(token, 1)
            for head in heads:
                q, k = (jnp.take_along_axis(keys[head, part, :, block], lane, axis=1) for part in (0, 1))  # [A, B]
                at = (head * shape.num_tokens + token) * static.scalars
                for member in range(shape.group):
                    where = head * shape.group + member
                    state = states[where].astype(jnp.float32) * scalars[0, at + member]
                    seen = jnp.sum(state * k, axis=0, keepdims=True)
                    change = scalars[0, at + shape.group + member] * (values[where, row] - seen)
                    alike = scalars[0, at + 2 * shape.group]
                    answers[where, row] = jnp.sum(state * q, axis=0, keepdims=True) + alike * change
                    states[where] = (state + k * change).astype(states.dtype)
            return carry

        return lax.fori_loop(*span, run_token, carry)

    lax.fori_loop(0, static.together // beside, run_heads, 0)


@dataclass(frozen=True)
class _Ring:
    """The ring of buffers through which states of rows go; a row of no tokens takes no part."""

    static: _Static
    pool: Ref  # [R, N, A, B]
    states: Ref
    rows: tuple[Ref, Ref, Ref]  # starts, slots to read, slots to write
    semaphores: tuple[Ref, Ref]

    def _find(self, slot: Scalar) -> Ref:
        heads = self.static.together * self.static.shape.group
        return self.pool.at[slot, pl.ds(pl.program_id(0) * heads, heads)]

    def _has(self, row: Scalar, slot: Scalar) -> Scalar:
        starts = self.rows[0]
        return (starts[row] < starts[row + 1]) & (slot >= 0) & (slot < self.static.slots)

    def fetch(self, row: Scalar) -> None:
        """Starts the copy of a row's states, or makes them zeros."""
        slot, buffer = self.rows[1][row], lax.rem(row, self.static.buffers)
        has = self._has(row, slot)

        @pl.when(has)
        def _() -> None:
            pltpu.make_async_copy(self._find(slot), self.states.at[buffer], self.semaphores[0].at[buffer]).start()

        @pl.when(~has)
        def _() -> None:
            self.states[buffer] = jnp.zeros(self.states.shape[1:], self.states.dtype)

    def await_read(self, row: Scalar) -> None:
        """Waits for what `fetch` started."""
        slot, buffer = self.rows[1][row], lax.rem(row, self.static.buffers)

        @pl.when(self._has(row, slot))
        def _() -> None:
            wait_copy(pltpu.make_async_copy(self._find(slot), self.states.at[buffer], self.semaphores[0].at[buffer]))

    def store(self, row: Scalar) -> None:
        """Starts the copy of a row's states to their slot."""
        slot, buffer = self.rows[2][row], lax.rem(row, self.static.buffers)

        @pl.when(self._has(row, slot))
        def _() -> None:
            pltpu.make_async_copy(self.states.at[buffer], self._find(slot), self.semaphores[1].at[buffer]).start()

    def await_write(self, row: Scalar) -> None:
        """Waits for what `store` started."""
        slot, buffer = self.rows[2][row], lax.rem(row, self.static.buffers)

        @pl.when(self._has(row, slot))
        def _() -> None:
            wait_copy(pltpu.make_async_copy(self.states.at[buffer], self._find(slot), self.semaphores[1].at[buffer]))


def _count_buffers(shape: RuleShape, together: int) -> int:
    fit = _RING_BYTES // (together * _count_state_bytes(shape))
    return min(max(fit, _LEAST_BUFFERS), _MOST_BUFFERS)


def _count_state_bytes(shape: RuleShape) -> int:
    """Bytes of the states of a key head."""
    return shape.group * shape.key_dim * shape.value_dim * jnp.dtype(shape.state_dtype).itemsize


def _choose_heads(shape: RuleShape, num_cores: int) -> int | None:
    """The most key heads that fit a step of the grid, of which each core has one at least; None if not even one."""
    token_bytes = 2 * 4 * (2 + 2 * shape.group) * LANES  # two blocks each are in memory
    num_tokens = pad_row(shape.num_tokens)
    for heads in range(shape.keys, 0, -1):
        if shape.keys % heads or (shape.keys // heads < num_cores and heads > 1):
            continue
        states = _count_buffers(shape, heads) * heads * _count_state_bytes(shape)
        scalars = 2 * 4 * heads * shape.num_tokens * (2 * shape.group + 1)
        limit = VMEM_LIMIT - (8 << 20)
        if states + heads * num_tokens * token_bytes <= limit and scalars <= _SCALARS_LIMIT:
            return heads
    return None
