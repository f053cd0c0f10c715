"""Rotary position embedding: frequencies of every published scaling, and the rotation itself.

Frequencies are float32 numpy constants computed once per program; angles are float32 products of positions and
frequencies inside it. Sources: RoFormer (Su et al. 2021), position interpolation (Chen et al. 2023), dynamic NTK
(public note by "emozilla", 2023), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3.1 model card.

Two scalings depend on the length of a sequence: dynamic NTK and LongRoPE. A cached key cannot be rotated again when its
sequence grows, and a request's tokens must not depend on its neighbours or on the chunks of its prompt. So the length
here is the engine's `max_model_len`, the same for all sequences. Up to the trained length the plain (short) frequencies
apply, which is exact; above it the frequencies of `max_model_len` (dynamic) or the long factors (LongRoPE) apply to
sequences of every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the length beyond `trained_length`, up to `factor` times it."""

    factor: float
    trained_length: int


@dataclass(frozen=True)
class YarnScaling:
    """Dimensions between `beta_fast` and `beta_slow` rotations blend from unscaled to divided by `factor`."""

    factor: float
    trained_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths above `trained_length / low_freq_factor` are stretched by `factor`, short ones kept."""

    factor: float
    trained_length: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class LongRopeScaling:
    """One divisor per frequency: `short_factor` up to `trained_length`, `long_factor` above."""

    trained_length: int
    attention_factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]


@dataclass(frozen=True)
class ProportionalScaling:
    """Of the frequencies of a whole head the first `share` stay, divided by `factor`; the rest do not rotate."""

    share: float
    factor: float = 1.0


Scaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """The first `rotary_dim` (even) of a head's dimensions rotate; the rest pass through.

    With `sections` a token of an image has three positions: its frame, row and column. The frequencies take turns, as
    in Qwen3-VL: of every three the second rotates by the row, as often as `sections[1]` says, the third by the column.
    """

    rotary_dim: int
    theta: float
    scaling: Scaling | None = None
    sections: tuple[int, int, int] | None = None

    @property
    def attention_factor(self) -> float:
        """Factor on cosine and sine (YaRN, LongRoPE)."""
        return getattr(self.scaling, "attention_factor", 1.0)

    def max_length(self, trained_length: int) -> int:
        """Returns the longest sequence that this embedding supports in a model trained on `trained_length`."""
        match self.scaling:
            case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
                return int(trained_length * factor)
            case YarnScaling(factor=factor, trained_length=original):
                return max(trained_length, int(original * factor))
            case _:
                return trained_length

    def list_axes(self) -> np.ndarray:
        """Returns which of the three positions each frequency rotates by, [rotary_dim // 2]."""
        axes = np.zeros(self.rotary_dim // 2, np.int32)
        for axis in (1, 2) if self.sections is not None else ():
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return axes

    def inverse_frequencies(self, max_model_len: int) -> np.ndarray:
        """Returns float32 radians per position, [rotary_dim // 2], for sequences of at most `max_model_len`."""
        if self.scaling is None:
            return _plain_frequencies(self.theta, self.rotary_dim)
        return _FORMULAS[type(self.scaling)](self, self.scaling, max_model_len)


def _powers(theta: float, rotary_dim: int) -> np.ndarray:
    """Returns theta ** (2i / rotary_dim) in float32: exponents rounded to float32, powers correctly rounded."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def _plain_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    return np.float32(1.0) / _powers(theta, rotary_dim)


def _linear_frequencies(rope: RopeConfig, scaling: LinearScaling, max_model_len: int) -> np.ndarray:
    return _plain_frequencies(rope.theta, rope.rotary_dim) / np.float32(scaling.factor)


def _dynamic_frequencies(rope: RopeConfig, scaling: DynamicScaling, max_model_len: int) -> np.ndarray:
    length = max(max_model_len, scaling.trained_length)
    growth = scaling.factor * length / scaling.trained_length - (scaling.factor - 1.0)
    theta = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return _plain_frequencies(theta, rope.rotary_dim)


def _yarn_frequencies(rope: RopeConfig, scaling: YarnScaling, max_model_len: int) -> np.ndarray:
    dim = rope.rotary_dim

    def turns_to_dimension(turns: float) -> float:
        ratio = scaling.trained_length / (turns * 2.0 * math.pi)
        return dim * math.log(ratio) / (2.0 * math.log(rope.theta))

    low, high = turns_to_dimension(scaling.beta_fast), turns_to_dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    powers = _powers(rope.theta, dim)
    stretched = np.float32(1.0) / (np.float32(scaling.factor) * powers)
    return stretched * (np.float32(1.0) - keep) + (np.float32(1.0) / powers) * keep


def _llama3_frequencies(rope: RopeConfig, scaling: Llama3Scaling, max_model_len: int) -> np.ndarray:
    plain = _plain_frequencies(rope.theta, rope.rotary_dim)
    length, factor = np.float32(scaling.trained_length), np.float32(scaling.factor)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    wavelength = np.float32(2.0 * math.pi) / plain
    blend = (length / wavelength - low) / (high - low)
    blended = (np.float32(1.0) - blend) * plain / factor + blend * plain
    return np.where(wavelength > length / low, plain / factor, np.where(wavelength < length / high, plain, blended))


def _longrope_frequencies(rope: RopeConfig, scaling: LongRopeScaling, max_model_len: int) -> np.ndarray:
    factors = scaling.long_factor if max_model_len > scaling.trained_length else scaling.short_factor
    return np.float32(1.0) / (np.asarray(factors, np.float32) * _powers(rope.theta, rope.rotary_dim))


def _proportional_frequencies(rope: RopeConfig, scaling: ProportionalScaling, max_model_len: int) -> np.ndarray:
    plain = _plain_frequencies(rope.theta, rope.rotary_dim) / np.float32(scaling.factor)
    turning = int(scaling.share * rope.rotary_dim // 2)
    return np.where(np.arange(len(plain)) < turning, plain, np.float32(0.0))


_FORMULAS: dict[type, Callable[..., np.ndarray]] = {
    LinearScaling: _linear_frequencies,
    DynamicScaling: _dynamic_frequencies,
    YarnScaling: _yarn_frequencies,
    Llama3Scaling: _llama3_frequencies,
    LongRopeScaling: _longrope_frequencies,
    ProportionalScaling: _proportional_frequencies,
}


def rotary_table(
    rope: RopeConfig, positions: Int[Array, " T"] | Int[Array, "3 T"], max_model_len: int
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Returns float32 cosines and sines of the angles of every position, times the attention factor."""
    frequencies = jnp.asarray(rope.inverse_frequencies(max_model_len))
    by_frequency = positions[:, None] if positions.ndim == 1 else positions[rope.list_axes()].T
    angles = by_frequency.astype(jnp.float32) * frequencies[None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(
    x: Float[Array, "T heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """Returns `x` with dimensions i and i + half of each head rotated, in float32; the result has the dtype of `x`."""
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
