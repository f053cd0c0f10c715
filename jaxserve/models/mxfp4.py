"""MXFP4, expanded to bfloat16: 4-bit floats in blocks of 32 with one power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxserve.errors import WeightsError

BLOCK = 32
"""Values that share a scale; two are in a byte, the first in its lower half."""

_BIAS = 127  # of a scale's exponent
_NAN = 0xFF


@dataclass(frozen=True)
class Mxfp4Rows:
    """Rows [n, D] of a matrix, expanded where they are indexed: every value is exact in bfloat16.

    `blocks` [n, D / 32, 16] and `scales` [n, D / 32] are bytes; `name` is the tensor of the scales, for errors.
    """

    blocks: np.ndarray
    scales: np.ndarray
    name: str

    dtype = np.dtype(ml_dtypes.bfloat16)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the expanded rows."""
        return len(self), self.scales.shape[1] * BLOCK

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, index: tuple[slice | np.ndarray, slice]) -> np.ndarray:
        """Returns some columns of some rows; WeightsError for a scale that is NaN."""
        rows, columns = index
        start, stop, _ = columns.indices(self.shape[1])
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        scales, pairs = np.asarray(self.scales[rows, blocks]), np.asarray(self.blocks[rows, blocks])
        if (scales == _NAN).any():
            raise WeightsError("holds the scale 0xff, which is NaN; download the file again", field=self.name)
        values = _list_pairs()[(scales.astype(np.uint16) << 8)[..., None] | pairs]
        values = values.view(self.dtype).reshape(len(scales), -1)
        return values[:, start % BLOCK : start % BLOCK + stop - start]


@functools.cache
def _list_pairs() -> np.ndarray:
    """Returns the two values of each scale and byte as the bits of two bfloat16 numbers, [256 * 256] u32."""
    halves = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    pairs = np.stack([np.tile(halves, 16), np.repeat(halves, 16)], axis=1)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(pairs, np.arange(256)[:, None, None] - _BIAS)
        return np.ascontiguousarray(scaled.astype(ml_dtypes.bfloat16)).view(np.uint32).reshape(-1)
