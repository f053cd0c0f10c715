"""The state space of Mamba-2 (Dao and Gu 2024): the recurrence of its heads' states.

A head's state S [P, A] follows each token: S = exp(g) S + dt x b^T; its answer is S c + skip x. The heads of a group
share b and c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.core.layers.context import StateSlots
from jaxserve.core.layers.ragged import accumulate_decay, einsum, run_recurrence, take_valid
from pallas_kernels.recurrent.api import advance_states
from pallas_kernels.recurrent.spec import RuleTokens, StateRows
from pallas_kernels.spec import BatchMeta


class GroupSizes(NamedTuple):
    """Groups, the heads of each, and their numbers."""

    groups: int  # G
    heads: int  # r, so that N = G r
    head_dim: int  # P
    state_size: int  # A


class SpaceInputs(NamedTuple):
    """What the recurrence reads of each token; a group's channels are the x of its heads, its b and its c."""

    channels: Float[Array, "T G rP+2A"]
    steps: Float[Array, "T N"]  # dt, float32
    rates: Float[Array, " N"]  # g / dt, float32
    skip: Float[Array, " N"]  # float32


class _Tokens(NamedTuple):
    """Some tokens in float32; zeros where there is none."""

    x: Float[Array, "*n N P"]  # times dt
    b: Float[Array, "*n G A"]
    c: Float[Array, "*n G A"]
    decay: Float[Array, "*n N"]
    skipped: Float[Array, "*n N P"]


class _Matrices(NamedTuple):
    """What a tile needs beside its tokens and the state in front of it."""

    reads: Float[Array, "*n N t s"]  # exp(G_t - G_s) c_t b_s for s <= t, where G_t = g_1 + .. + g_t
    since_start: Float[Array, "*n N t"]  # exp(G_t)
    to_end: Float[Array, "*n N s"]  # exp(G_end - G_s)


def apply_space(
    sizes: GroupSizes,
    inputs: SpaceInputs,
    pool: jax.Array,
    offset: int,
    batch: BatchMeta,
    slots: StateSlots,
    impl: str = "xla",
) -> tuple[Float[Array, "T N P"], jax.Array]:
    """Returns the answers in the channels' dtype, zeros for padding, and the pool [L, R, N, P, A] after the step.

    `impl` is a kernel (pallas_kernels/recurrent), or "xla" for the form below.
    """
    if impl != "xla":
        everything = jnp.arange(len(inputs.channels))
        found = _StateSpace(sizes, inputs).take(everything, everything < batch.query_start_loc[-1])
        tokens = RuleTokens(found.c, found.b, found.x, found.decay, None)
        rows = StateRows(batch.query_start_loc, slots.read, slots.write)
        out, pool = advance_states(tokens, pool, offset, rows, impl=impl)
        return (out + found.skipped).astype(inputs.channels.dtype), pool
    shape = len(inputs.channels), sizes.groups * sizes.heads, sizes.head_dim
    answers = jax.ShapeDtypeStruct(shape, inputs.channels.dtype)
    return run_recurrence(_StateSpace(sizes, inputs), answers, pool, offset, batch, slots)


@dataclass(frozen=True)
class _StateSpace:
    """The recurrence for the tokens of a step; see `Recurrence`."""

    sizes: GroupSizes
    inputs: SpaceInputs

    def take(self, ids: Int[Array, "*n"], valid: Bool[Array, "*n"]) -> _Tokens:
        """See `Recurrence.take`."""
        sizes, inputs = self.sizes, self.inputs
        channels, steps = take_valid(inputs.channels, ids, valid), take_valid(inputs.steps, ids, valid)
        end = sizes.heads * sizes.head_dim
        x = channels[..., :end].reshape(*steps.shape, sizes.head_dim)
        b, c = channels[..., end : end + sizes.state_size], channels[..., end + sizes.state_size :]
        return _Tokens(x * steps[..., None], b, c, steps * inputs.rates, x * inputs.skip[:, None])

    def step(
        self, tokens: _Tokens, state: Float[Array, "n N P A"]
    ) -> tuple[Float[Array, "n N P"], Float[Array, "n N P A"]]:
        """See `Recurrence.step`."""
        remains = jnp.exp(tokens.decay)[..., None, None]
        b, c = self._spread(tokens)
        state = remains * state + tokens.x[..., None] * b[..., None, :]
        return einsum("nhpa,nha->nhp", state, c) + tokens.skipped, state

    def prepare(self, tokens: _Tokens) -> _Matrices:
        """See `Recurrence.prepare`."""
        decay = accumulate_decay(tokens.decay)
        alike = einsum("ntga,nsga->ngts", tokens.c, tokens.b)
        reads = decay.between * jnp.repeat(alike, self.sizes.heads, axis=1)
        return _Matrices(reads, decay.since_start, decay.to_end)

    def advance(
        self, tokens: _Tokens, prepared: _Matrices, state: Float[Array, "N P A"]
    ) -> tuple[Float[Array, "t N P"], Float[Array, "N P A"]]:
        """See `Recurrence.advance`."""
        x, b, c = (jnp.moveaxis(each, 1, 0) for each in (tokens.x, *self._spread(tokens)))  # [N t ...]
        seen = einsum("hta,hpa->htp", c, state) * prepared.since_start[..., None]
        answer = seen + einsum("hts,hsp->htp", prepared.reads, x)
        grown = einsum("hsp,hsa->hpa", x * prepared.to_end[..., None], b)
        state = prepared.since_start[:, -1, None, None] * state + grown
        return jnp.moveaxis(answer, 1, 0) + tokens.skipped, state

    def _spread(self, tokens: _Tokens) -> tuple[Float[Array, "*n N A"], Float[Array, "*n N A"]]:
        """Returns b and c of each head."""
        b, c = (jnp.repeat(each, self.sizes.heads, axis=-2) for each in (tokens.b, tokens.c))
        return b, c
