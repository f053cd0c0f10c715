"""The gated delta rule (Yang et al. 2025): the recurrence of Gated DeltaNet's states.

A head's state S [A, B] follows each token: S = exp(g) S; d = beta (v - S^T k); S = S + k d^T; its answer is S^T q. In a
tile every d depends on the state in front of the tile:

    (I + L) d = beta (v - exp(G) S^T k),  L_ts = beta_t exp(G_t - G_s) k_t k_s for s < t,  G_t = g_1 + .. + g_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.core.layers.context import StateSlots
from jaxserve.core.layers.ragged import TILE, accumulate_decay, einsum, run_recurrence, take_valid
from pallas_kernels.recurrent.api import advance_states
from pallas_kernels.recurrent.spec import RuleTokens, StateRows
from pallas_kernels.spec import BatchMeta

_EPS = 1e-6  # inside the root of q's and k's lengths


class HeadSizes(NamedTuple):
    """Key heads, the value heads of each, and their numbers."""

    keys: int  # K
    group: int  # r, so that N = K r
    key_dim: int  # A
    value_dim: int  # B


class RuleInputs(NamedTuple):
    """What the rule reads of each token; a key head's channels are its query, its key and the values of its group."""

    channels: Float[Array, "T K 2A+rB"]
    decay: Float[Array, "T N"]  # g, the logarithm of what remains, float32
    beta: Float[Array, "T N"]  # float32


class _Tokens(NamedTuple):
    """Some tokens in float32, with q and k of their final lengths, for each value head; zeros where there is none."""

    q: Float[Array, "*n N A"]
    k: Float[Array, "*n N A"]
    v: Float[Array, "*n N B"]
    decay: Float[Array, "*n N"]
    beta: Float[Array, "*n N"]


class _Matrices(NamedTuple):
    """What a tile needs beside its tokens and the state in front of it."""

    inverse: Float[Array, "*n N t s"]  # of I + L
    reads: Float[Array, "*n N t s"]  # exp(G_t - G_s) q_t k_s for s <= t
    since_start: Float[Array, "*n N t"]  # exp(G_t)
    to_end: Float[Array, "*n N s"]  # exp(G_end - G_s)


def apply_rule(
    sizes: HeadSizes,
    inputs: RuleInputs,
    pool: jax.Array,
    offset: int,
    batch: BatchMeta,
    slots: StateSlots,
    impl: str = "xla",
) -> tuple[Float[Array, "T N B"], jax.Array]:
    """Returns the answers in the channels' dtype, zeros for padding, and the pool [L, R, N, A, B] after the step.

    `impl` is a kernel (pallas_kernels/recurrent), or "xla" for the form below.
    """
    if impl != "xla":
        q, k, v = _split(sizes, inputs.channels.astype(jnp.float32))
        rows = StateRows(batch.query_start_loc, slots.read, slots.write)
        tokens = RuleTokens(q, k, v, inputs.decay, inputs.beta)
        out, pool = advance_states(tokens, pool, offset, rows, impl=impl)
        return out.astype(inputs.channels.dtype), pool
    shape = len(inputs.channels), sizes.keys * sizes.group, sizes.value_dim
    answers = jax.ShapeDtypeStruct(shape, inputs.channels.dtype)
    return run_recurrence(_DeltaRule(sizes, inputs), answers, pool, offset, batch, slots)


def _split(sizes: HeadSizes, channels: Float[Array, "*n K 2A+rB"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries and keys [*n, K, A] of their final lengths, and values [*n, N, B], of channels in float32."""
    size = sizes.key_dim
    q, k, v = channels[..., :size], channels[..., size : 2 * size], channels[..., 2 * size :]
    q, k = (each * lax.rsqrt(jnp.sum(each * each, axis=-1, keepdims=True) + _EPS) for each in (q, k))
    return q * size**-0.5, k, v.reshape(*v.shape[:-2], sizes.keys * sizes.group, sizes.value_dim)


@dataclass(frozen=True)
class _DeltaRule:
    """The rule for the tokens of a step; see `Recurrence`."""

    sizes: HeadSizes
    inputs: RuleInputs

    def take(self, ids: Int[Array, "*n"], valid: Bool[Array, "*n"]) -> _Tokens:
        """See `Recurrence.take`."""
        sizes, inputs = self.sizes, self.inputs
        q, k, v = _split(sizes, take_valid(inputs.channels, ids, valid))
        q, k = (jnp.repeat(each, sizes.group, axis=-2) for each in (q, k))
        return _Tokens(q, k, v, take_valid(inputs.decay, ids, valid), take_valid(inputs.beta, ids, valid))

    def step(
        self, tokens: _Tokens, state: Float[Array, "n N A B"]
    ) -> tuple[Float[Array, "n N B"], Float[Array, "n N A B"]]:
        """See `Recurrence.step`."""
        remains = jnp.exp(tokens.decay)[..., None, None]
        seen = einsum("nhja,nhab->nhjb", jnp.stack([tokens.k, tokens.q], axis=2), state) * remains
        change = tokens.beta[..., None] * (tokens.v - seen[..., 0, :])
        answer = seen[..., 1, :] + jnp.sum(tokens.k * tokens.q, axis=-1)[..., None] * change
        return answer, remains * state + tokens.k[..., None] * change[..., None, :]

    def prepare(self, tokens: _Tokens) -> _Matrices:
        """See `Recurrence.prepare`."""
        place = jnp.arange(TILE)
        decay = accumulate_decay(tokens.decay)
        alike = einsum("ntha,nsha->nhts", tokens.k, tokens.k)
        beta = jnp.moveaxis(tokens.beta, 1, -1)[..., None]
        return _Matrices(
            inverse=invert_unit_lower(jnp.where(place[:, None] > place, beta * decay.between * alike, 0.0)),
            reads=decay.between * einsum("ntha,nsha->nhts", tokens.q, tokens.k),
            since_start=decay.since_start,
            to_end=decay.to_end,
        )

    def advance(
        self, tokens: _Tokens, prepared: _Matrices, state: Float[Array, "N A B"]
    ) -> tuple[Float[Array, "t N B"], Float[Array, "N A B"]]:
        """See `Recurrence.advance`."""
        q, k, v = (jnp.moveaxis(each, 1, 0) for each in tokens[:3])  # [N t ...]
        seen = einsum("hta,hab->htb", jnp.concatenate([k, q], axis=1), state)
        seen *= jnp.tile(prepared.since_start, 2)[..., None]
        change = einsum("hts,hsb->htb", prepared.inverse, tokens.beta.T[..., None] * (v - seen[:, :TILE]))
        answer = seen[:, TILE:] + einsum("hts,hsb->htb", prepared.reads, change)
        grown = einsum("hsa,hsb->hab", k * prepared.to_end[..., None], change)
        return jnp.moveaxis(answer, 1, 0), prepared.since_start[:, -1, None, None] * state + grown


def invert_unit_lower(strict: Float[Array, "*n t t"]) -> Float[Array, "*n t t"]:
    """Returns the inverse of I + L for strictly lower L, where t is a power of two.

    Inverses of blocks become those of blocks twice as large, exactly. Products of powers of L would double, too, but
    where keys are alike these grow beyond any precision before they cancel.
    """
    size = strict.shape[-1]
    place, inverse, block = jnp.arange(size), jnp.eye(size, dtype=strict.dtype), 1
    while block < size:
        pair = place // (2 * block)
        is_beside = (pair[:, None] == pair) & (place[:, None] // block % 2 == 1) & (place // block % 2 == 0)
        beside = jnp.where(is_beside, strict, 0.0)
        if block > 1:
            beside = einsum("...ij,...jk,...kl->...il", inverse, beside, inverse)
        inverse, block = inverse - beside, 2 * block
    return inverse
