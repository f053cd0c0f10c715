"""The gated delta rule for Hopper (Pallas Mosaic GPU): the recurrence itself, on states in registers.

Columns of a state need nothing of each other. So a block takes 64 columns of one head's state through one row's tokens:
it reads them once, keeps them in the registers of a warpgroup, and writes them once. A row has the same bits wherever
its text is cut, and whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.recurrent.spec import DeltaShape, DeltaTokens, StateRows

_KEY_DIM = 128  # more would not fit the registers
_COLUMNS = 64  # of a block
_DTYPES = ("float32", "bfloat16")


def find_obstacle(shape: DeltaShape) -> str | None:
    """Why the kernel cannot run, in words for users."""
    if shape.key_dim % 8 or shape.key_dim > _KEY_DIM or shape.value_dim % _COLUMNS:
        return (
            f"it needs key heads of a multiple of 8 up to {_KEY_DIM} and value heads of a multiple of {_COLUMNS}, "
            f"these are of {shape.key_dim} x {shape.value_dim}"
        )
    if shape.state_dtype not in _DTYPES:
        return f"it keeps states of {' or '.join(_DTYPES)}, these are of {shape.state_dtype}"
    return None


def run(
    tokens: DeltaTokens, pool: jax.Array, offset: int, rows: StateRows, shape: DeltaShape, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `apply_delta_rule`; raises ValueError for what `find_obstacle` names."""
    obstacle = find_obstacle(shape)
    if obstacle is not None:
        raise ValueError(f"the delta rule for Hopper cannot run: {obstacle}")
    launch = compat.kernel(
        _Kernel(shape, offset, pool.shape[1]),
        out_type=jax.ShapeDtypeStruct(tokens.v.shape, jnp.float32),
        grid=(len(rows.read), shape.heads, shape.value_dim // _COLUMNS),
        grid_names=("row", "head", "part"),
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(interpret),
        kernel_name="delta_rule",
    )
    alike = jnp.sum(tokens.q * tokens.k, axis=-1)
    states = jax.new_ref(pool)  # makes the write in place: a kernel's outputs are new arrays
    out = launch(*tokens[:3], jnp.exp(tokens.decay), tokens.beta, alike, *rows, states)
    is_token = jnp.arange(shape.num_tokens) < rows.starts[-1]
    return jnp.where(is_token[:, None, None], out, 0.0), jax.freeze(states)


@dataclass(frozen=True)
class _Kernel:
    """The kernel's body and its static parameters."""

    shape: DeltaShape
    layer: int
    slots: int

    @property
    def __name__(self) -> str:
        return "delta_rule"

    def __call__(self, *refs: jax.Ref) -> None:
        *tokens, starts, read, write, pool, out = refs
        row, head = lax.axis_index("row"), lax.axis_index("head")
        columns = pl.ds(pl.multiple_of(lax.axis_index("part") * _COLUMNS, _COLUMNS), _COLUMNS)
        first, end = starts[row], starts[row + 1]

        @pl.when(first < end)
        def _() -> None:
            source, target = read[row], write[row]
            state = self.load_state(pool, source, head, columns)

            def follow(token: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                state, *now = carry
                ahead = self.load_token(tokens, jnp.minimum(token + 1, end - 1), head, columns)
                state, answer = self.advance(state, *now)
                out.at[token, head, columns][...] = answer
                return state, *ahead

            state, *_ = lax.fori_loop(first, end, follow, (state, *self.load_token(tokens, first, head, columns)))

            @pl.when((target >= 0) & (target < self.slots))
            def _() -> None:
                pool.at[self.layer, target, head, :, columns][...] = state.astype(pool.dtype)

    def load_state(self, pool: jax.Ref, slot: jax.Array, head: jax.Array, columns: pl.Slice) -> jax.Array:
        """The columns [A, 64] of a head's state in float32, zeros where there is no such slot."""
        has = (slot >= 0) & (slot < self.slots)
        state = compat.load_turned(pool.at[self.layer, jnp.where(has, slot, 0), head, :, columns])
        state = state.astype(jnp.float32)
        return jnp.where(jnp.broadcast_to(has, state.shape), state, jnp.zeros(state.shape))

    def load_token(
        self, tokens: list[jax.Ref], token: jax.Array, head: jax.Array, columns: pl.Slice
    ) -> tuple[jax.Array, ...]:
        """Query and key [A], the value's columns [64], and three numbers."""
        q, k, v, remains, beta, alike = tokens
        key = lax.div(head, self.shape.group)
        vectors = compat.load_turned(q.at[token, key], 1), compat.load_turned(k.at[token, key], 1)
        value = compat.load_turned(v.at[token, head, columns], 0)
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
        """The state behind a token, and the answer's columns [64]."""
        q, k = (lax.broadcast_in_dim(each, state.shape, (0,)) for each in (q, k))
        state = state * remains
        change = beta * (v - jnp.sum(state * k, axis=0))
        answer = jnp.sum(state * q, axis=0) + alike * change
        state = state + k * lax.broadcast_in_dim(change, state.shape, (1,))
        # States of 16 bits are rounded behind each token, wherever a step ends.
        return state.astype(self.shape.state_dtype).astype(jnp.float32), answer
