"""Reads the tensors of GGUF files by the names, orders and shapes that Hugging Face's files have.

Matrices in Q8_0, Q4_0 and MXFP4 keep their bits, as parts that compressed-tensors has (gpt-oss: as its own files have).
All other numbers are float32, expanded where they are indexed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxserve.core.weights.gguf_config import find_architecture
from jaxserve.core.weights.gguf_names import TensorName, find_form, list_names
from jaxserve.errors import WeightsError
from jaxserve.gguf_file import GGUFFile, GGUFTensor, open_gguf

_FLOAT = np.dtype(np.float32)
_HALF = 2  # bytes of a block's scale, and numbers of four bits in a byte


@dataclass(frozen=True)
class ExpandedRows:
    """Rows [n, D] float32 of bytes [n, D / block * block_bytes], which are decoded where they are indexed."""

    stored: np.ndarray
    block: int
    block_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    dtype = _FLOAT

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the decoded rows."""
        return len(self.stored), self.stored.shape[1] // self.block_bytes * self.block

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: slice | tuple[Any, ...]) -> Self | np.ndarray:
        """Returns some columns of some rows as an array, or without columns the rows, still as bytes."""
        if not isinstance(index, tuple):
            return replace(self, stored=self.stored[index])
        rows, columns = index if len(index) == 2 else (index[0], slice(None))
        start, stop, _ = columns.indices(self.shape[1])
        first, last = start // self.block, -(-stop // self.block)
        stored = self.stored[rows, first * self.block_bytes : last * self.block_bytes]
        if not stored.size:
            return np.empty((len(stored), max(0, stop - start)), _FLOAT)
        offset = first * self.block
        return self.decode(np.ascontiguousarray(stored))[:, start - offset : stop - offset]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self[:, :]
        return np.asarray(whole, dtype)

    def astype(self, dtype: Any, order: str = "K") -> np.ndarray:
        """Returns all numbers in another dtype."""
        return np.asarray(self).astype(dtype, copy=False)


Read = Callable[[], "np.ndarray | ExpandedRows"]


@dataclass(frozen=True)
class _Entry:
    """A tensor under a name of Hugging Face's.

    `dtype` is named as in safetensors; `stored` is where the tensor, or a part of it, lies.
    """

    dtype: str
    shape: tuple[int, ...]
    stored: GGUFTensor
    num_bytes: int
    read: Read


class GGUFCheckpoint:
    """All tensors of one model's GGUF files by name, as `SafetensorsCheckpoint` has those of safetensors."""

    def __init__(self, path: Path, entries: dict[str, _Entry]) -> None:
        self.path = path
        self._entries = entries

    @property
    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._entries[name].shape

    def count_bytes(self, name: str) -> int:
        """See `Checkpoint`; scales are counted with their matrix."""
        return self._entries[name].num_bytes

    def file(self, name: str) -> str:
        """See `Checkpoint`."""
        return self._entries[name].stored.file

    def dtype_name(self, name: str) -> str:
        """See `Checkpoint`."""
        return self._entries[name].dtype

    def read(self, name: str) -> np.ndarray | ExpandedRows:
        """See `Checkpoint`."""
        return self._entries[name].read()

    def prefetch(self, name: str) -> None:
        """See `Checkpoint`."""
        self._advise(name, "MADV_WILLNEED")

    def release(self, name: str) -> None:
        """See `Checkpoint`."""
        self._advise(name, "MADV_DONTNEED")

    def _advise(self, name: str, advice: str) -> None:
        stored = self._entries[name].stored
        start = stored.start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, advice) and stored.end > start:
            stored.data.madvise(getattr(mmap, advice), start, stored.end - start)


def open_gguf_checkpoint(path: Path) -> GGUFCheckpoint:
    """Returns the tensors of the GGUF files at `path`; errors as `read_gguf_config`."""
    file = open_gguf(path)
    _, architecture = find_architecture(file)
    entries: dict[str, _Entry] = {}
    joined: dict[str, TensorName] = {}
    for name, each in list_names(file, architecture).items():
        if name == each.gguf_name:
            joined[name] = each
            continue
        order, shift = _find_order(file, name, each, permutes=architecture.permutes), 0.0
        if architecture.adds_one and name.endswith("norm.weight"):
            shift = 1.0
        form = find_form(name, each, architecture)
        if form is None:
            read = partial(_read_floats, each, order, shift)
            entries[name] = _Entry("F32", each.shape, each.tensor, _count_bytes(each), read)
        else:
            entries |= _list_parts(name, form, each, partial(_take, each, order))
    join = _join_latent_heads if architecture.latent else _join_experts
    return GGUFCheckpoint(file.path, entries | dict(join(joined)))


def _find_order(file: GGUFFile, name: str, each: TensorName, *, permutes: bool) -> np.ndarray | None:
    """Returns the rows of q or k in the order that rotates halves; None where they are in it."""
    part = next((part for part in ("q", "k") if f".self_attn.{part}_proj." in name), None)
    if not permutes or part is None:
        return None
    architecture = file.metadata["general.architecture"]
    heads = file.metadata.get(f"{architecture}.attention.head_count")
    if part == "k":
        heads = file.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    rows = each.shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        message = f"tensor {each.gguf_name} has {rows} rows, which are not heads of an even size for head_count {heads}"
        raise WeightsError(message, field=str(file.path), value=each.gguf_name)
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _take(each: TensorName, order: np.ndarray | None = None) -> np.ndarray:
    """Returns the bytes [..., bytes of a row] of a tensor or of one of its experts, with its rows in `order`."""
    tensor = each.tensor
    whole = np.frombuffer(tensor.data, np.uint8, tensor.end - tensor.start, offset=tensor.start)
    row = tensor.shape[-1] // tensor.block * tensor.block_bytes
    rows = whole.reshape(*tensor.shape[:-1], row)
    rows = rows if each.expert is None else rows[each.expert]
    return rows if order is None or len(tensor.shape) == 1 else rows[order]


def _read_floats(each: TensorName, order: np.ndarray | None = None, shift: float = 0.0) -> np.ndarray | ExpandedRows:
    """Returns the numbers float32: a matrix with its rows in `order`, a vector in `order` and less `shift`."""
    from gguf import GGMLQuantizationType, dequantize

    tensor = each.tensor
    decode = partial(dequantize, qtype=GGMLQuantizationType[tensor.type])
    if len(each.shape) == 2:
        return ExpandedRows(_take(each, order), tensor.block, tensor.block_bytes, decode)
    found = decode(np.ascontiguousarray(_take(each))).reshape(each.shape)
    return found if len(each.shape) > 1 else (found if order is None else found[order]) - np.float32(shift)


def _count_bytes(each: TensorName) -> int:
    size = each.tensor.end - each.tensor.start
    return size if each.expert is None else size // each.tensor.shape[0]


def _list_parts(name: str, form: str, each: TensorName, take: Callable[[], np.ndarray]) -> dict[str, _Entry]:
    """Returns the values and scales of a matrix that keeps its bits."""
    rows, columns = each.shape
    module, scale = name.removesuffix(".weight"), ("U8" if form == "float4" else "F16")
    end, dtype, shape = {
        "int8": ("weight", "I8", (rows, columns)),
        "int4": ("weight_packed", "I32", (rows, columns // 8)),
        "float4": ("weight_packed", "U8", (rows, columns // 2)),
    }[form]
    scales = (rows, columns // each.tensor.block)
    readers = {end: _READERS[form], "weight_scale": _read_exponents if form == "float4" else _read_scales}
    values = _Entry(dtype, shape, each.tensor, _count_bytes(each), lambda: readers[end](_split(take(), each.tensor)))
    stored = _Entry(scale, scales, each.tensor, 0, lambda: readers["weight_scale"](_split(take(), each.tensor)))
    return {f"{module}.{end}": values, f"{module}.weight_scale": stored}


def _split(rows: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """Returns the blocks [..., blocks of a row, bytes of a block]."""
    return rows.reshape(*rows.shape[:-1], -1, tensor.block_bytes)


def _find_halves(blocks: np.ndarray) -> np.ndarray:
    """Returns the scales [..., blocks] float16 at the beginning of blocks."""
    return np.ascontiguousarray(blocks[..., :_HALF]).view("<f2")[..., 0]


def _read_scales(blocks: np.ndarray) -> np.ndarray:
    """Returns the scales, 1 for that of a block of zeros, as no other format has a scale of 0."""
    scales = _find_halves(blocks)
    return np.where(scales == 0, np.float16(1), scales)


def _read_int8(blocks: np.ndarray) -> np.ndarray:
    values = np.where((_find_halves(blocks) == 0)[..., None], np.int8(0), blocks[..., _HALF:].view(np.int8))
    return values.reshape(*blocks.shape[:-2], -1)


def _read_int4(blocks: np.ndarray) -> np.ndarray:
    packed = np.where((_find_halves(blocks) == 0)[..., None], np.uint8(0x88), blocks[..., _HALF:])
    return _pair(packed).reshape(*blocks.shape[:-2], -1).view("<i4")


def _read_float4(blocks: np.ndarray) -> np.ndarray:
    return _pair(blocks[..., 1:]).reshape(*blocks.shape[:-2], -1)


def _read_exponents(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., 0])


def _pair(packed: np.ndarray) -> np.ndarray:
    """Returns bytes of two neighbours each, of bytes whose upper halves follow all of their lower halves."""
    numbers = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


_READERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "int8": _read_int8,
    "int4": _read_int4,
    "float4": _read_float4,
}


def _join_experts(experts: dict[str, TensorName]) -> Iterator[tuple[str, _Entry]]:
    """Yields gpt-oss's experts, whose gate and up alternate row by row in one tensor."""
    for name, gate in experts.items():
        layer, _, kind = name.removeprefix("blk.").replace(".ffn_gate_exps", "").partition(".")
        own = f"model.layers.{layer}.mlp.experts"
        if ".ffn_down_exps." in name:
            layer, _, end = name.removeprefix("blk.").partition(".ffn_down_exps.")
            yield from _join(f"model.layers.{layer}.mlp.experts.down_proj", end, [gate])
        elif ".ffn_gate_exps." in name:
            up = experts.get(name.replace("_gate_", "_up_"))
            if up is None or (up.shape, up.tensor.type) != (gate.shape, gate.tensor.type):
                message = f"tensor {name} and that of up need the same shape and type"
                raise WeightsError(message, field=gate.tensor.file, value=name)
            yield from _join(f"{own}.gate_up_proj", kind, [gate, up])


def _join_latent_heads(halves: dict[str, TensorName]) -> Iterator[tuple[str, _Entry]]:
    """Yields `kv_b_proj` [N * (nope_dim + value_dim), R] of the keys [N, R, nope_dim] and values [N, value_dim, R].

    Older files have it as one tensor.
    """
    for name, keys in halves.items():
        own = f"model.layers.{name.split('.')[1]}.self_attn.kv_b_proj.weight"
        if ".attn_kv_b." in name:
            yield own, _Entry("F32", keys.shape, keys.tensor, _count_bytes(keys), partial(_read_whole, keys))
        elif ".attn_k_b." in name:
            values = halves.get(name.replace("_k_b.", "_v_b."))
            if values is None or len(keys.shape) != 3 or keys.shape[:2] != values.shape[::2]:
                message = f"tensor {name} of shape {keys.shape} and that of v need the same heads and rank"
                raise WeightsError(message, field=keys.tensor.file, value=name)
            heads, rank, size = keys.shape
            shape, num_bytes = (heads * (size + values.shape[1]), rank), _count_bytes(keys) + _count_bytes(values)
            yield own, _Entry("F32", shape, keys.tensor, num_bytes, partial(_read_latent_heads, keys, values))


def _read_whole(each: TensorName) -> np.ndarray:
    return np.asarray(_read_floats(each)).reshape(each.shape)


def _read_latent_heads(keys: TensorName, values: TensorName) -> np.ndarray:
    heads = np.concatenate([_read_whole(keys).swapaxes(1, 2), _read_whole(values)], axis=1)
    return heads.reshape(-1, keys.shape[1])


def _join(own: str, kind: str, tensors: list[TensorName]) -> Iterator[tuple[str, _Entry]]:
    first, count = tensors[0], len(tensors)
    shape = (first.shape[0], count * first.shape[1], *first.shape[2:])
    num_bytes = sum(map(_count_bytes, tensors))

    def read(part: Callable[[TensorName], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        return np.stack([part(each) for each in tensors], axis=2).reshape(shape)

    def blocks(part: Callable[[np.ndarray], np.ndarray], each: TensorName) -> np.ndarray:
        return part(_split(_take(each), each.tensor))

    if first.tensor.type == "MXFP4":
        groups = shape[2] // first.tensor.block
        for end, last, part, size in (
            ("blocks", (groups, first.tensor.block // 2), _read_float4, num_bytes),
            ("scales", (groups,), _read_exponents, 0),
        ):
            whole = (*shape[:2], *last)
            yield f"{own}_{end}", _Entry("U8", whole, first.tensor, size, partial(read, partial(blocks, part), whole))
    else:
        end = "_bias" if kind == "bias" else ".weight"
        yield f"{own}{end}", _Entry("F32", shape, first.tensor, num_bytes, partial(read, _read_whole, shape))
