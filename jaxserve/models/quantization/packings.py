"""How files pack the values, scales and zero points of a matrix [rows, columns] = [out, in], one class for each way.

Values are decoded to signed integers or 8-bit floats [rows, columns], scales to float32 and zero points to int8
[rows, groups], where a zero point is counted as values are. What is packed into int32 words stands there lowest bits
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.models.quantization.formats import MatrixFormat

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each column among the eight of a word; stored are 0 2 4 6 1 3 5 7
_STORED_VALUES = {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}


class Stored(NamedTuple):
    """A tensor of a matrix: the end of its name, its shape, and the dtypes that it may have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Packing:
    """Where each part of a matrix is stored, and what decodes it: `part(form, rows, columns)` and `part(form, array)`.

    Parts are "values", "scales", "zeros" and "order" [columns], which says for each place of a row the column it is of.
    """

    tensors: Callable[[MatrixFormat, int, int], Mapping[str, Stored]]
    decoders: Mapping[str, Callable[[MatrixFormat, np.ndarray], np.ndarray]]


def decode(form: MatrixFormat, part: str, shape: tuple[int, int], array: np.ndarray, name: str) -> np.ndarray:
    """Returns a part of a matrix of `shape` [rows, columns]; WeightsError for scales that no value can have.

    `name` is the tensor's, for errors.
    """
    rows, columns = shape
    decoded = PACKINGS[form.packing].decoders[part](form, array)
    if part == "values":
        return decoded[:rows, :columns]
    if part == "order":
        return _order_columns(form, decoded, name)
    groups = form.count_groups(columns)
    decoded = decoded.reshape(-1, 1) if groups == 1 else decoded
    block = form.block[0] or rows
    decoded = np.repeat(decoded, block, axis=0)[:rows] if len(decoded) < rows else decoded[:rows]
    if part == "scales":
        decoded = decoded.astype(np.float32)
        if not np.isfinite(decoded).all() or not decoded.all():
            raise WeightsError("holds a scale that is 0, infinite or no number; download the file again", field=name)
    return decoded


def _order_columns(form: MatrixFormat, groups: np.ndarray, name: str) -> np.ndarray:
    """Returns the columns sorted by their group [columns] i32; each group has as many as the format says."""
    order = np.argsort(groups, kind="stable").astype(np.int32)
    size = form.block[1] or len(groups)
    if not np.array_equal(groups[order], np.arange(len(groups)) // size):
        raise WeightsError(f"has groups that are not of {size} columns each", field=name)
    return order


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the values of int32 words [n, m] as unsigned bytes [n, m * 32 / bits]."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)


def _center(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns unsigned values [0, 2**bits) as signed ones, whose zero is the middle."""
    return (values ^ np.uint8(1 << (bits - 1))).view(np.int8) if bits == 8 else values.view(np.int8) - np.int8(8)


def _plain_tensors(form: MatrixFormat, rows: int, columns: int) -> dict[str, Stored]:
    block = form.block[0]
    scale_rows = () if block is None else (-(-rows // block),)
    groups = form.count_groups(columns)
    scales = (*scale_rows, groups) if groups > 1 else scale_rows
    stored = {
        "values": Stored("weight", (rows, columns), (_STORED_VALUES[form.dtype],)),
        "scales": Stored(form.scale, scales, _SCALE_DTYPES),
    }
    return stored | ({"zeros": Stored("weight_zero_point", scales, ("I8",))} if form.zeros else {})


def _as_rows(form: MatrixFormat, array: np.ndarray) -> np.ndarray:
    return array if array.ndim == 2 else array.reshape(-1, 1)


def _compressed_tensors(form: MatrixFormat, rows: int, columns: int) -> dict[str, Stored]:
    per_word, groups = 32 // form.bits, form.count_groups(columns)
    stored = {
        "values": Stored("weight_packed", (rows, -(-columns // per_word)), ("I32",)),
        "scales": Stored(form.scale, (rows, groups), _SCALE_DTYPES),
    }
    if form.zeros:
        stored["zeros"] = Stored("weight_zero_point", (-(-rows // per_word), groups), ("I32",))
    return stored | ({"order": Stored("weight_g_idx", (columns,), ("I32",))} if form.ordered else {})


def _gptq_tensors(form: MatrixFormat, rows: int, columns: int) -> dict[str, Stored]:
    per_word, groups = 32 // form.bits, form.count_groups(columns)
    stored = {
        "values": Stored("qweight", (-(-columns // per_word), rows), ("I32",)),
        "scales": Stored("scales", (groups, rows), _SCALE_DTYPES),
        "zeros": Stored("qzeros", (groups, -(-rows // per_word)), ("I32",)),
    }
    return stored | ({"order": Stored("g_idx", (columns,), ("I32",))} if form.ordered else {})


def _gptq_zeros(form: MatrixFormat, array: np.ndarray) -> np.ndarray:
    stored = unpack(array, form.bits) + np.uint8(form.zero_offset)
    return _center(stored & np.uint8(2**form.bits - 1), form.bits).T


def _awq_tensors(form: MatrixFormat, rows: int, columns: int) -> dict[str, Stored]:
    words, groups = -(-rows // 8), form.count_groups(columns)
    return {
        "values": Stored("qweight", (columns, words), ("I32",)),
        "scales": Stored("scales", (groups, rows), _SCALE_DTYPES),
        "zeros": Stored("qzeros", (groups, words), ("I32",)),
    }


def _awq_values(form: MatrixFormat, array: np.ndarray) -> np.ndarray:
    values = _center(unpack(array, form.bits), form.bits)
    return values.reshape(len(values), -1, 8)[..., _AWQ_PLACES].reshape(len(values), -1).T


PACKINGS = {
    "plain": Packing(_plain_tensors, {"values": lambda form, array: array, "scales": _as_rows, "zeros": _as_rows}),
    "compressed": Packing(
        _compressed_tensors,
        {
            "values": lambda form, array: _center(unpack(array, form.bits), form.bits),
            "scales": _as_rows,
            "zeros": lambda form, array: _center(unpack(array.T, form.bits), form.bits).T,
            "order": lambda form, array: array,
        },
    ),
    "gptq": Packing(
        _gptq_tensors,
        {
            "values": lambda form, array: _center(unpack(array.T, form.bits), form.bits),
            "scales": lambda form, array: array.T,
            "zeros": _gptq_zeros,
            "order": lambda form, array: array,
        },
    ),
    "awq": Packing(
        _awq_tensors,
        {"values": _awq_values, "scales": lambda form, array: array.T, "zeros": _awq_values},
    ),
}
