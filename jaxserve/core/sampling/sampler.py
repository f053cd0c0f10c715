"""From logits to token ids. Functions of logits take one row, for `map_rows`."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jaxserve.core.sampling.draw import RowLogits, draw
from jaxserve.core.sampling.randomness import draw_numbers, row_keys
from jaxserve.core.sampling.thresholds import BLOCK, make_filters

_GREEDY_BELOW = 1e-5  # a colder row is greedy (vLLM's limit): 1 / temperature must stay far from overflow


@flax.struct.dataclass
class SamplingInputs:
    """The sampling parameters of a step's rows; of one row (without S) in functions of one row."""

    temperature: Float[Array, " S"]  # 0: greedy
    top_k: Int32[Array, " S"]  # outside [1, V): off
    top_p: Float[Array, " S"]  # 1: off
    min_p: Float[Array, " S"]  # 0: off
    seed_low: Int[Array, " S"]  # 32 bits, int32 or uint32
    seed_high: Int[Array, " S"]  # 32 bits, int32 or uint32
    sequence_index: Int32[Array, " S"]  # which of a request's n sequences
    positions: Int32[Array, " S"]  # the position of the token being sampled
    # Only `shape_logits` reads the rest; without it they may be None.
    presence: Float[Array, " S"] | None = None  # 0: off
    frequency: Float[Array, " S"] | None = None  # 0: off
    repetition: Float[Array, " S"] | None = None  # above 0; 1: off
    has_edits: Int[Array, " S"] | Bool[Array, " S"] | None = None  # 0: `shape_logits` leaves the row alone


def draw_uniforms(inputs: SamplingInputs) -> Float32[Array, " S"]:
    """Returns the number in [0, 1) that decides each row's draw, by its seed, sequence and position alone."""
    keys = row_keys(inputs.seed_low, inputs.seed_high, inputs.sequence_index, inputs.positions)
    return draw_numbers(keys)


def is_finite(logits: Float[Array, " V"]) -> Bool[Array, ""]:
    """Returns whether a row can be sampled: no NaN, no +inf, and at least one token not masked by -inf."""
    return _is_finite(jnp.max(_mark_faults(logits)))


def _is_finite(largest: Float[Array, ""]) -> Bool[Array, ""]:
    return (largest > -jnp.inf) & (largest < jnp.inf)


def _mark_faults(logits: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Replaces NaN by +inf, because XLA:CPU's maximum does not always propagate NaN."""
    return jnp.where(logits < jnp.inf, logits, jnp.inf)


def mask_padding(logits: Float[Array, "... V"], vocab_size: int | None) -> Float[Array, "... V"]:
    """Returns the logits with -inf from `vocab_size` on; None: unchanged."""
    if vocab_size is None or vocab_size == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def sample_greedy(
    logits: Float[Array, " V"], *, vocab_size: int | None = None
) -> tuple[Int32[Array, ""], Bool[Array, ""]]:
    """Returns the likeliest id, the lowest on ties, and whether the row `is_finite`; else the id is arbitrary.

    Ids from `vocab_size` on are padding, never chosen.
    """
    last = (len(logits) if vocab_size is None else vocab_size) - 1
    logits = mask_padding(logits, vocab_size)
    largest = jnp.max(_mark_faults(logits))
    return _find_first(logits, largest, last), _is_finite(largest)


def _find_first(logits: Float[Array, "*dims"], value: Float[Array, ""], last: int) -> Int32[Array, ""]:
    """Returns the first index of `value`, at most `last`. XLA:CPU's argmax reduces pairs and is ten times slower."""
    places = jnp.arange(logits.size, dtype=jnp.int32).reshape(logits.shape)
    return jnp.min(jnp.where(logits == value, places, last))


def sample(
    logits: Float[Array, " V"], inputs: SamplingInputs, uniform: Float[Array, ""], *, vocab_size: int
) -> tuple[Int32[Array, ""], Bool[Array, ""]]:
    """Returns an id drawn by `uniform` (`draw_uniforms`) from the filtered softmax(logits / temperature), and whether
    the row `is_finite`; else the id is arbitrary, below `vocab_size`.

    The id depends on the row's own logits (f32) and `inputs` only, and is never a filtered or masked (-inf) token. At
    temperature 0 it is `sample_greedy`'s. `find_threshold` has the filters and their treatment of ties.
    """
    is_greedy = inputs.temperature < _GREEDY_BELOW
    padded = jnp.pad(mask_padding(logits, vocab_size), (0, -len(logits) % BLOCK), constant_values=-jnp.inf)
    blocks = padded.reshape(-1, BLOCK)
    maxima = jnp.max(_mark_faults(blocks), axis=-1)
    largest = jnp.max(maxima)

    def draw_one() -> Array:
        scale = 1 / jnp.where(is_greedy, 1, inputs.temperature)  # finite also if both sides are computed
        filters = make_filters(inputs.top_k, inputs.top_p, inputs.min_p, vocab_size)
        return draw(RowLogits(blocks, maxima, scale), filters, uniform)

    id_ = lax.cond(is_greedy, lambda: _find_first(blocks, largest, vocab_size - 1), draw_one)
    return id_, _is_finite(largest)
