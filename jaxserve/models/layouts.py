"""Turns a checkpoint's tensors into parameters: numpy arrays of any one dtype in, arrays of that dtype out.

Checkpoints hold projections as [out, in]. Some models rotate interleaved pairs of a head's dimensions: (0, 1), (2, 3)
and so on. Their q and k are reordered here to rotate halves, as all others do; no product of q and k changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.layers.attention import AttentionConfig

_TILE = 16  # rows per step of a transposed copy: 32 bytes of bfloat16, three times as fast as one whole copy


def count_rows(attention: AttentionConfig) -> dict[str, int]:
    """Returns the rows of the checkpoint's q, k and v projections."""
    kv_rows = attention.num_kv_heads // attention.kv_repeats * attention.head_dim
    return {"q": attention.num_heads * attention.head_dim, "k": kv_rows, "v": kv_rows}


def split_stacked(attention: AttentionConfig, tensor: np.ndarray) -> list[np.ndarray]:
    """Returns q, k and v of one tensor with all rows of q, then of k, then of v."""
    rows = count_rows(attention)
    return np.split(tensor, [rows["q"], rows["q"] + rows["k"]])


def split_by_head(attention: AttentionConfig, tensor: np.ndarray) -> list[np.ndarray]:
    """Returns q, k and v of one tensor with q, k and v of each head together; every head has its own k and v."""
    heads = tensor.reshape(-1, 3, attention.head_dim, *tensor.shape[1:])
    return [heads[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3)]


def order_halves(rotary_dim: int, head_dim: int) -> np.ndarray:
    """Returns, for each dimension of a head that rotates halves, that dimension's index in an interleaved head."""
    turned = np.arange(rotary_dim)
    return np.concatenate([turned[0::2], turned[1::2], np.arange(rotary_dim, head_dim)])


def fuse_qkv(
    attention: AttentionConfig, order: np.ndarray | None, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """Returns `qkv` [D, K * (G + 2) * H] of q [N * H, D], k and v [K * H, D]; biases have no D.

    `order` is the order of dimensions within the heads of q and k.
    """
    group, head_dim = attention.group_size, attention.head_dim
    q, k = (_reorder(part, head_dim, order) for part in (q, k))
    parts = []
    for head in range(attention.num_kv_heads):
        source = head // attention.kv_repeats
        parts.append(q[head * group * head_dim : (head + 1) * group * head_dim])
        parts += [tensor[source * head_dim : (source + 1) * head_dim] for tensor in (k, v)]
    return _join_rows(parts)


def spread_heads(head_dim: int, order: np.ndarray | None, shape: tuple[int, ...], tensor: np.ndarray) -> np.ndarray:
    """Returns the weight of q's or k's norm in `shape`, repeated for heads that are stored several times."""
    heads = _reorder(tensor.reshape(-1), head_dim, order).reshape(-1, head_dim)
    return np.repeat(heads, int(np.prod(shape)) // tensor.size, axis=0).reshape(shape)


def fuse_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Returns [2, D, F] from two of [F, D], or [2, F] from two biases [F]."""
    if gate.ndim == 1:
        return np.stack([gate, up])
    out = np.empty((2, *gate.T.shape), gate.dtype)
    for part, place in zip((gate, up), out, strict=True):
        _join_rows([part], place)
    return out


def transpose(matrix: np.ndarray) -> np.ndarray:
    """Returns [in, out] from [out, in]; a bias [out] unchanged."""
    return _join_rows([matrix])


def _reorder(rows: np.ndarray, head_dim: int, order: np.ndarray | None) -> np.ndarray:
    """Returns the rows [n * H, ...] of n heads, those of each head in the order given."""
    if order is None:
        return rows
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _join_rows(parts: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    """Returns the transpose of the concatenated parts, in `out` if given; one-dimensional parts are only concatenated.

    Copies in tiles of plain integers: numpy moves bfloat16 one call per element, and whole transposes miss the cache.
    """
    dtype = parts[0].dtype
    words = [np.ascontiguousarray(part).view(f"u{dtype.itemsize}") for part in parts]
    if parts[0].ndim == 1:
        return np.concatenate(words).view(dtype)
    if out is None:
        out = np.empty((parts[0].shape[1], sum(len(part) for part in parts)), dtype)
    written, column = out.view(words[0].dtype), 0
    for part in words:
        for start in range(0, len(part), _TILE):
            tile = part[start : start + _TILE]
            written[:, column : column + len(tile)] = tile.T
            column += len(tile)
    return out
