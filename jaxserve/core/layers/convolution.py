"""A short causal convolution of each channel over the texts of a step, with the inputs before the step as its state."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.context import StateSlots
from jaxserve.core.layers.recurrent import read_slots, write_rows
from pallas_kernels.spec import BatchMeta


def convolve_heads(
    leaves: Mapping[str, jax.Array],
    x: Float[Array, "T H C"],
    pool: Float[Array, "L R H V"],
    offset: int,
    batch: BatchMeta,
    slots: StateSlots,
) -> tuple[Float[Array, "T H C"], jax.Array]:
    """Returns the convolution of all heads' channels in float32, and the pool with the inputs that the next step needs.

    Parameters: `conv` [W, H * C] and perhaps `conv_bias` [H * C]. A head's last W - 1 inputs lie side by side in the
    pool, so that devices can share heads.
    """
    tokens, heads, size = x.shape
    kept = read_slots(pool, offset, slots.read)
    if len(kept) == 1:  # without the barrier XLA reads the pool again after it was written, and so copies it
        kept = lax.optimization_barrier(kept)
    kept = kept.reshape(-1, heads, pool.shape[-1] // size, size).swapaxes(1, 2)
    sums, kept = convolve(leaves["conv"], x.reshape(tokens, -1), kept.reshape(*kept.shape[:2], -1), batch)
    if "conv_bias" in leaves:
        sums += leaves["conv_bias"].astype(jnp.float32)
    kept = kept.reshape(*kept.shape[:2], heads, size).swapaxes(1, 2)
    kept = kept.reshape(len(kept), *pool.shape[2:])
    return sums.reshape(x.shape), write_rows(pool, offset, slots.write, kept, leaves_pending=slots.leaves_pending)


def convolve(
    weight: Float[Array, "W C"], x: Float[Array, "T C"], earlier: Float[Array, "S W-1 C"], batch: BatchMeta
) -> tuple[Float[Array, "T C"], Float[Array, "S W-1 C"]]:
    """Returns the sums of each token's last W inputs in float32, and the last W - 1 inputs of each row after the step.

    The last line of `weight` is that of the token itself. `earlier` are each row's last inputs before the step, zeros
    where its text begins. Every sum is made in the same order, wherever a text is cut.
    """
    reach, starts = weight.shape[0] - 1, batch.query_start_loc
    ages = jnp.arange(len(x)) - starts[batch.token_rows]  # tokens of the row in front of it, in this step
    wide = weight.astype(jnp.float32)
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(reach, 0, -1):
        kept = earlier[batch.token_rows, jnp.clip(ages - back, -reach, -1) + reach]
        beside = jnp.pad(x, ((back, 0), (0, 0)))[: len(x)]
        total += wide[reach - back] * jnp.where((ages >= back)[:, None], beside, kept).astype(jnp.float32)
    return total + wide[reach] * x.astype(jnp.float32), _keep_last(x, earlier, starts)


def _keep_last(
    x: Float[Array, "T C"], earlier: Float[Array, "S W-1 C"], starts: Int[Array, " S+1"]
) -> Float[Array, "S W-1 C"]:
    """Returns each row's last inputs, which are earlier ones where the step has too few of its tokens."""
    rows, reach = earlier.shape[:2]
    lengths = starts[1:] - starts[:-1]
    places = lengths[:, None] - reach + jnp.arange(reach)  # in the row's inputs of the step
    new = x[jnp.clip(starts[:-1, None] + places, 0, len(x) - 1)]
    kept = earlier[jnp.arange(rows)[:, None], jnp.clip(places + reach, 0, reach - 1)]
    return jnp.where((places >= 0)[:, :, None], new, kept.astype(x.dtype))
