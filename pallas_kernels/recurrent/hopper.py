"""Recurrent rules for Hopper (Pallas Mosaic GPU): the recurrence itself, on states in registers.

The values of a state need nothing of each other. So a block takes some values of one head's state, with all keys,
through one row's tokens: it reads them once, keeps them in the registers of a warpgroup, and writes them once. A row
has the same bits wherever its text is cut, and whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.recurrent.spec import RuleShape, RuleTokens, StateRows

_MOST_KEYS = 128  # more would not fit the registers
_DTYPES = ("float32", "bfloat16")
# By rule: the axis of keys in a state, its tiles in registers, what keys are a multiple of, and the values of a block.
_KEY_AXES = {"delta": 0, "space": 1}
_TILES = {"delta": compat.TURNED, "space": compat.BY_ROW}
_LEAST_KEYS = {"delta": 8, "space": 16}
_VALUES = {"delta": (64,), "space": (64, 32)}


def find_obstacle(shape: RuleShape) -> str | None:
    """Why the kernel cannot run, in words for users."""
    least, values = _LEAST_KEYS[shape.rule], _VALUES[shape.rule][-1]
    if shape.key_dim % least or shape.key_dim > _MOST_KEYS or shape.value_dim % values:
        return (
            f"it needs keys of a multiple of {least} up to {_MOST_KEYS} and values of a multiple of {values}, "
            f"these are of {shape.key_dim} and {shape.value_dim}"
        )
    if shape.state_dtype not in _DTYPES:
        return f"it keeps states of {' or '.join(_DTYPES)}, these are of {shape.state_dtype}"
    return None


def run(
    tokens: RuleTokens, pool: jax.Array, offset: int, rows: StateRows, shape: RuleShape, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `advance_states`; raises ValueError for what `find_obstacle` names."""
    obstacle = find_obstacle(shape)
    if obstacle is not None:
        raise ValueError(f"the recurrence for Hopper cannot run: {obstacle}")
    values = next(size for size in _VALUES[shape.rule] if shape.value_dim % size == 0)
    launch = compat.kernel(
        _Kernel(shape, values, pool.shape[1]),
        out_type=jax.ShapeDtypeStruct(tokens.v.shape, jnp.float32),
        grid=(len(rows.read), shape.heads, shape.value_dim // values),
        grid_names=("row", "head", "part"),
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(interpret),
        kernel_name=f"{shape.rule}_rule",
    )
    alike = jnp.sum(tokens.q * tokens.k, axis=-1)
    states = jax.new_ref(pool)  # makes the write in place: a kernel's outputs are new arrays
    beta = tokens.decay if tokens.beta is None else tokens.beta  # which nobody reads
    out = launch(*tokens[:3], jnp.exp(tokens.decay), beta, alike, *rows, jnp.full(1, offset, jnp.int32), states)
    is_token = jnp.arange(shape.num_tokens) < rows.starts[-1]
    return jnp.where(is_token[:, None, None], out, 0.0), jax.freeze(states)


@dataclass(frozen=True)
class _Kernel:
    """The kernel's body and its static parameters."""

    shape: RuleShape
    values: int  # of a block
    slots: int  # R

    @property
    def __name__(self) -> str:
        return f"{self.shape.rule}_rule"

    @property
    def key_axis(self) -> int:
        """The axis of keys in a state."""
        return _KEY_AXES[self.shape.rule]

    def __call__(self, *refs: jax.Ref) -> None:
        *tokens, starts, read, write, layer, pools, out = refs
        row, head = lax.axis_index("row"), lax.axis_index("head")
        part = pl.ds(pl.multiple_of(lax.axis_index("part") * self.values, self.values), self.values)
        first, end, pool = starts[row], starts[row + 1], pools.at[layer[0]]

        @pl.when(first < end)
        def _() -> None:
            source, target = read[row], write[row]
            state = self.load_state(pool, source, head, part)

            def follow(token: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                state, *now = carry
                ahead = self.load_token(tokens, jnp.minimum(token + 1, end - 1), head, part)
                state, answer = self.advance(state, *now)
                out.at[token, head, part][...] = answer
                return state, *ahead

            state, *_ = lax.fori_loop(first, end, follow, (state, *self.load_token(tokens, first, head, part)))

            @pl.when((target >= 0) & (target < self.slots))
            def _() -> None:
                self.find_state(pool, target, head, part)[...] = state.astype(pool.dtype)

    def find_state(self, pool: jax.Ref, slot: jax.Array, head: jax.Array, part: pl.Slice) -> jax.Ref:
        """The block's part of a head's state."""
        states = pool.at[slot, head]
        return states.at[part, :] if self.key_axis else states.at[:, part]

    def load_state(self, pool: jax.Ref, slot: jax.Array, head: jax.Array, part: pl.Slice) -> jax.Array:
        """The block's part of a head's state in float32, zeros where there is no such slot."""
        has = (slot >= 0) & (slot < self.slots)
        found = self.find_state(pool, jnp.where(has, slot, 0), head, part)
        state = compat.load_as(found, _TILES[self.shape.rule]).astype(jnp.float32)
        return jnp.where(jnp.broadcast_to(has, state.shape), state, jnp.zeros(state.shape))

    def load_token(
        self, tokens: list[jax.Ref], token: jax.Array, head: jax.Array, part: pl.Slice
    ) -> tuple[jax.Array, ...]:
        """Query and key [A], the block's values, and three numbers."""
        q, k, v, remains, beta, alike = tokens
        key, tile = lax.div(head, self.shape.group), _TILES[self.shape.rule]
        of_keys, of_values = tile.reduce(1 - self.key_axis), tile.reduce(self.key_axis)
        vectors = compat.load_as(q.at[token, key], of_keys), compat.load_as(k.at[token, key], of_keys)
        value = compat.load_as(v.at[token, head, part], of_values)
        return *vectors, value, remains[token, head], beta[token, head], alike[token, key]

    def advance(
        self,
        state: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        remains: jax.Array,
        beta: jax.Array,
        alike: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The state behind a token, and the block's part of the answer."""
        q, k = (lax.broadcast_in_dim(each, state.shape, (self.key_axis,)) for each in (q, k))
        state = state * remains
        change = beta * (v - jnp.sum(state * k, axis=self.key_axis)) if self.shape.rule == "delta" else v
        answer = jnp.sum(state * q, axis=self.key_axis) + alike * change
        state = state + k * lax.broadcast_in_dim(change, state.shape, (1 - self.key_axis,))
        # States of 16 bits are rounded behind each token, wherever a step ends.
        return state.astype(self.shape.state_dtype).astype(jnp.float32), answer
