"""Matrices that are decoded where they are indexed, so nobody holds a large one twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np


class ByteRows(ABC):
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
class DecodedRows(ByteRows):
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
        """See `ByteRows.take`."""
        return replace(self, stored=self.stored[rows])

    def read(self, rows: slice | np.ndarray, start: int, stop: int) -> np.ndarray:
        """See `ByteRows.read`."""
        decoded = self.decode(np.asarray(self.stored[rows, start // self.width : -(-stop // self.width)]))
        return decoded[:, start % self.width : start % self.width + stop - start]


@dataclass(frozen=True)
class TransposedRows(ByteRows):
    """Rows from `first` to `last` of the transpose of a matrix that is decoded row by row."""

    matrix: DecodedRows
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of these rows."""
        return self.last - self.first, len(self.matrix)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the decoded numbers."""
        return self.matrix.dtype

    def take(self, rows: slice) -> Self:
        """See `ByteRows.take`."""
        start, stop, _ = rows.indices(len(self))
        return replace(self, first=self.first + start, last=self.first + max(start, stop))

    def read(self, rows: slice | np.ndarray, start: int, stop: int) -> np.ndarray:
        """See `ByteRows.read`."""
        if isinstance(rows, np.ndarray):
            return self.read(slice(None), start, stop)[rows]
        taken = self.take(rows)
        return self.matrix.read(slice(start, stop), taken.first, taken.last).T
