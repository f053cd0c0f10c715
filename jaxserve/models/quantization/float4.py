"""4-bit floats of the type E2M1, two in a byte, the first in its lower half (OCP Microscaling Formats 1.0).

MXFP4 has a power of two for 32 of them, so every number is exact in bfloat16. NVFP4 has an 8-bit float for 16 of them,
times a factor for the matrix.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import ml_dtypes
import numpy as np

from jaxserve.errors import WeightsError

MX_BLOCK, NV_BLOCK = 32, 16
"""Columns that share a scale."""

_PAIR = 2  # values in a byte
_BIAS = 127  # of a scale's exponent
_NAN = 0xFF


class _ByteRows(ABC):
    """Rows [n, D] that are made of bytes where they are indexed."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """The shape of all rows."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | tuple[slice | np.ndarray, slice]) -> Self | np.ndarray:
        """Returns some columns of some rows as an array, or without columns the rows, still as bytes."""
        if isinstance(index, slice):
            return self.take(index)
        rows, columns = index
        start, stop, _ = columns.indices(self.shape[1])
        return self.read(rows, start, stop)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self.read(slice(None), 0, self.shape[1])
        return whole if dtype is None else whole.astype(dtype)

    @abstractmethod
    def take(self, rows: slice) -> Self:
        """Returns some of the rows, without reading them."""

    @abstractmethod
    def read(self, rows: slice | np.ndarray, start: int, stop: int) -> np.ndarray:
        """Returns the columns from `start` to `stop` of some rows."""


@dataclass(frozen=True)
class DecodedRows(_ByteRows):
    """Rows [n, D] of `dtype`; `decode` makes numbers [m, k * width] of some of the bytes `stored` [n, D / width]."""

    stored: np.ndarray
    width: int
    dtype: np.dtype
    decode: Callable[[np.ndarray], np.ndarray]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the decoded rows."""
        return len(self.stored), self.stored.shape[1] * self.width

    def take(self, rows: slice) -> Self:
        """See `_ByteRows.take`."""
        return replace(self, stored=self.stored[rows])

    def read(self, rows: slice | np.ndarray, start: int, stop: int) -> np.ndarray:
        """See `_ByteRows.read`."""
        decoded = self.decode(np.asarray(self.stored[rows, start // self.width : -(-stop // self.width)]))
        return decoded[:, start % self.width : start % self.width + stop - start]


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
class Mxfp4Rows(_ByteRows):
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
        """See `_ByteRows.take`."""
        return replace(self, packed=self.packed[rows], scales=self.scales[rows])

    def read(self, rows: slice | np.ndarray, start: int, stop: int) -> np.ndarray:
        """See `_ByteRows.read`; WeightsError for a scale that is NaN."""
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
