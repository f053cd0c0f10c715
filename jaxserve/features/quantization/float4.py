"""4-bit floats of the type E2M1, two in a byte, the first in its lower half (OCP Microscaling Formats 1.0).

MXFP4 has a power of two for 32 of them, so every number is exact in bfloat16. NVFP4 has an 8-bit float for 16 of them,
times a factor for the matrix.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Self

import ml_dtypes
import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.features.quantization.byte_rows import ByteRows, DecodedRows

MX_BLOCK, NV_BLOCK = 32, 16
"""Columns that share a scale."""

_PAIR = 2  # values in a byte
_BIAS = 127  # of a scale's exponent
_NAN = 0xFF


def list_values(packed: np.ndarray) -> DecodedRows:
    """Returns the values [n, D] float4_e2m1fn of bytes [n, D / 2]."""
    return DecodedRows(packed, _PAIR, np.dtype(ml_dtypes.float4_e2m1fn), _unpack)


def list_powers(exponents: np.ndarray, name: str) -> DecodedRows:
    """Returns powers of two [n, D] bfloat16 of E8M0 bytes [n, D]; `name` is their tensor, for errors."""

    def decode(found: np.ndarray) -> np.ndarray:
        _check_scales(found, name)
        return _list_powers()[found]

    return DecodedRows(as_bytes(exponents), 1, np.dtype(ml_dtypes.bfloat16), decode)


@dataclass(frozen=True)
class Mxfp4Rows(ByteRows):
    """Rows [n, D] of a matrix in MXFP4, expanded to bfloat16.

    `packed` [n, D / 2] and `scales` [n, D / 32] are bytes; `name` is the tensor of the scales, for errors.
    """

    packed: np.ndarray
    scales: np.ndarray
    name: str

    dtype = np.dtype(ml_dtypes.bfloat16)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the expanded rows."""
        return len(self.scales), self.scales.shape[1] * MX_BLOCK

    def take(self, rows: slice) -> Self:
        """See `ByteRows.take`."""
        return replace(self, packed=self.packed[rows], scales=self.scales[rows])

    def read(self, rows: slice | np.ndarray, start: int, stop: int) -> np.ndarray:
        """See `ByteRows.read`; WeightsError for a scale that is NaN."""
        first, end = start // MX_BLOCK, -(-stop // MX_BLOCK)
        scales = np.asarray(self.scales[rows, first:end])
        pairs = np.asarray(self.packed[rows, first * MX_BLOCK // _PAIR : end * MX_BLOCK // _PAIR])
        _check_scales(scales, self.name)
        pairs = pairs.reshape(*scales.shape, MX_BLOCK // _PAIR)
        values = _list_pairs()[(scales.astype(np.uint16) << 8)[..., None] | pairs]
        values = values.view(self.dtype).reshape(len(scales), -1)
        return values[:, start % MX_BLOCK : start % MX_BLOCK + stop - start]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns numbers of 8 bits as unsigned bytes."""
    return array if array.dtype == np.uint8 else array.view(np.uint8)


def _unpack(packed: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    return codes.reshape(len(packed), -1).view(ml_dtypes.float4_e2m1fn)


def _check_scales(scales: np.ndarray, name: str) -> None:
    if (scales == _NAN).any():
        raise WeightsError("holds the scale 0xff, which is NaN; download the file again", field=name)


@functools.cache
def _list_powers() -> np.ndarray:
    """Returns the power of two of each byte, [256] bfloat16; that of 0xff has no meaning."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1), np.arange(256) - _BIAS).astype(ml_dtypes.bfloat16)


@functools.cache
def _list_pairs() -> np.ndarray:
    """Returns the two values of each scale and byte as the bits of two bfloat16 numbers, [256 * 256] u32."""
    halves = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    pairs = np.stack([np.tile(halves, 16), np.repeat(halves, 16)], axis=1)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(pairs, np.arange(256)[:, None, None] - _BIAS)
        return np.ascontiguousarray(scaled.astype(ml_dtypes.bfloat16)).view(np.uint32).reshape(-1)
