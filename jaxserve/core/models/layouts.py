"""Turns a checkpoint's tensors into parameters: numpy arrays of any one dtype in, parameters of that dtype out.

What is large is put together only where it is indexed (`JoinedRows`, `StackedParts`), so a host that needs a part of a
parameter, or takes it in pieces, reads no more of the files.

Checkpoints hold projections as [out, in]. Some models rotate interleaved pairs of a head's dimensions: (0, 1), (2, 3)
and so on. Their q and k are reordered here to rotate halves, as all others do; no product of q and k changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxserve.core.layers.attention import AttentionConfig

_TILE = 16  # rows per step of a transposed copy: 32 bytes of bfloat16, three times as fast as one whole copy


class Rows(Protocol):
    """Rows [n, D] or [n] of one dtype: an array, or what is expanded where it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


@dataclass(frozen=True)
class RowBlock:
    """Rows [n, D] of a tensor, or [n] of a bias, which is not read before it is needed.

    `order` are the rows that are meant, in their order; None for all as they stand.
    """

    rows: Rows
    order: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows if self.order is None else self.order)

    def read(self, start: int, stop: int, columns: tuple[slice, ...]) -> np.ndarray:
        """Returns some columns of some of the rows: a view of the tensor if the rows stand in order."""
        rows = slice(start, stop) if self.order is None else self.order[start:stop]
        return self.rows[rows, *columns]


class Assembled(ABC):
    """A parameter that is put together where it is indexed, by a tuple of one slice for each dimension."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        sizes = [len(range(size)[each]) for size, each in zip(self.shape, index, strict=True)]
        out = np.empty(sizes, self.dtype)
        self.write(index, out)
        return out

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self[(slice(None),) * len(self.shape)]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    @abstractmethod
    def write(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Writes what `index` names into `out`."""


class JoinedRows(Assembled):
    """The transpose [D, N] of row blocks, one after the other; of blocks [n] it is [N]."""

    def __init__(self, blocks: Sequence[RowBlock]) -> None:
        self._blocks = blocks
        first = blocks[0].rows
        self.dtype, self.shape = first.dtype, (*first.shape[1:], sum(map(len, blocks)))

    def write(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """See `Assembled.write`.

        Copies in tiles of plain integers: numpy moves bfloat16 one call per element, and whole transposes miss the
        cache.
        """
        words = f"u{self.dtype.itemsize}"
        written, column = out.view(words), 0
        for part in self._list_parts(index):
            for start in range(0, len(part), _TILE):
                tile = np.ascontiguousarray(part[start : start + _TILE]).view(words)
                written[..., column : column + len(tile)] = tile.T
                column += len(tile)

    def _list_parts(self, index: tuple[slice, ...]) -> Iterator[np.ndarray]:
        """Yields the parts of the blocks that `index` names, [n, d] or [n] each."""
        start, stop, _ = index[-1].indices(self.shape[-1])
        first = 0
        for block in self._blocks:
            begin, end = max(0, start - first), min(stop - first, len(block))
            if begin < end:
                yield block.read(begin, end, index[:-1])
            first += len(block)


class StackedParts(Assembled):
    """Parts of equal shapes [...] as one parameter [number of parts, ...]."""

    def __init__(self, parts: Sequence[Assembled]) -> None:
        self._parts = parts
        self.dtype, self.shape = parts[0].dtype, (len(parts), *parts[0].shape)

    def write(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """See `Assembled.write`."""
        for part, place in zip(self._parts[index[0]], out, strict=True):
            part.write(index[1:], place)


def count_rows(attention: AttentionConfig) -> dict[str, int]:
    """Returns the rows of the checkpoint's projections: q, k and v, or those of them that there are."""
    kv_rows = attention.num_kv_heads // attention.kv_repeats * attention.head_dim
    rows = {"q": attention.num_heads * (1 + attention.gated) * attention.head_dim, "k": kv_rows, "v": kv_rows}
    return {part: rows[part] for part in attention.projections}


def order_halves(rotary_dim: int, head_dim: int) -> np.ndarray:
    """Returns, for each dimension of a head that rotates halves, that dimension's index in an interleaved head."""
    turned = np.arange(rotary_dim)
    return np.concatenate([turned[0::2], turned[1::2], np.arange(rotary_dim, head_dim)])


def order_quarters(head_dim: int) -> np.ndarray:
    """Returns the same of a head whose two halves rotate apart, each its own halves: the middle quarters change."""
    return np.arange(head_dim).reshape(2, 2, -1).swapaxes(0, 1).reshape(-1)


def fuse_qkv(attention: AttentionConfig, order: np.ndarray | None, q: np.ndarray, *kv: np.ndarray) -> JoinedRows:
    """Returns `qkv` [D, K * (G + 2) * H] of q [N * H, D], k and v [K * H, D]; biases have no D.

    v, or k and v, may be missing. `order` is the order of dimensions within the heads of q and k. In q [2N * H, D] of
    gated attention each head has its gate behind it.
    """
    group, head_dim = attention.group_size * (1 + attention.gated), attention.head_dim
    group_order = None if order is None else np.concatenate([order + head * head_dim for head in range(group)])
    if attention.gated:
        heads = np.arange(group * head_dim).reshape(-1, 2, head_dim)
        group_order = np.concatenate([heads[:, 1], heads[:, 0]]).reshape(-1)
    blocks = []
    for head in range(attention.num_kv_heads):
        source = head // attention.kv_repeats * head_dim
        blocks.append(RowBlock(q[head * group * head_dim : (head + 1) * group * head_dim], group_order))
        blocks += [RowBlock(k[source : source + head_dim], order) for k in kv[:1]]
        blocks += [RowBlock(v[source : source + head_dim]) for v in kv[1:]]
    return JoinedRows(blocks)


def fuse_stacked(attention: AttentionConfig, tensor: np.ndarray) -> JoinedRows:
    """Returns `qkv` of one tensor with all rows of q, then of k, then of v."""
    rows = count_rows(attention)
    return fuse_qkv(attention, None, *np.split(tensor, [rows["q"], rows["q"] + rows["k"]]))


def keep_heads(attention: AttentionConfig, tensor: np.ndarray) -> JoinedRows:
    """Returns `qkv` of one tensor with q, k and v of each head together, if every head has its own k and v."""
    assert attention.group_size == 1 and attention.kv_repeats == 1
    return transpose(tensor)


def spread_heads(head_dim: int, order: np.ndarray | None, shape: tuple[int, ...], tensor: np.ndarray) -> np.ndarray:
    """Returns the weight of q's or k's norm in `shape`, repeated for heads that are stored several times."""
    heads = _reorder(tensor.reshape(-1), head_dim, order).reshape(-1, head_dim)
    return np.repeat(heads, int(np.prod(shape)) // tensor.size, axis=0).reshape(shape)


def fuse_gate_up(gate: np.ndarray, up: np.ndarray) -> StackedParts:
    """Returns [2, D, F] from two of [F, D], or [2, F] from two biases [F]."""
    return StackedParts([transpose(part) for part in (gate, up)])


def transpose(matrix: Rows, order: np.ndarray | None = None) -> JoinedRows:
    """Returns [in, out] from [out, in] with its rows in `order`; a bias [out] unchanged."""
    return JoinedRows([RowBlock(matrix, order)])


def stack_matrices(matrices: Iterable[Rows], order: np.ndarray | None = None) -> StackedParts:
    """Returns [E, in, out] of E matrices [out, in], whose rows are taken in `order`."""
    return StackedParts([transpose(matrix, order) for matrix in matrices])


def _reorder(rows: np.ndarray, head_dim: int, order: np.ndarray | None) -> np.ndarray:
    """Returns the rows [n * H, ...] of n heads, those of each head in the order given."""
    if order is None:
        return rows
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)
