"""Packings: how files pack the values, scales and zero points of a matrix [rows, columns] = [out, in].

Values are decoded to signed integers or floats of 4 or 8 bits [rows, columns], scales to float32 or, if they are powers
of two, bfloat16, and zero points to int8 [rows, groups], where a zero point is counted as values are. What is packed
into int32 words stands there lowest bits first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxserve.core.models.layouts import Rows
from jaxserve.core.models.matrix_formats import MatrixFormat
from jaxserve.errors import WeightsError
from jaxserve.features.quantization.byte_rows import DecodedRows, TransposedRows
from jaxserve.features.quantization.float4 import MX_BLOCK, Mxfp4Rows, as_bytes, list_powers, list_values

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each column among the eight of a word; stored are 0 2 4 6 1 3 5 7
_STORED_VALUES = {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}
_NO_SCALE = "holds a scale that is 0, infinite or no number"


class Stored(NamedTuple):
    """A tensor of a matrix: the end of its name, its shape, and the dtypes that it may have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]

    def name_in(self, module: str) -> str:
        """Returns the tensor's whole name."""
        return module + self.name if self.name.startswith("_") else f"{module}.{self.name}"


@dataclass(frozen=True)
class Packing:
    """Where each part of a matrix is stored, and what decodes it: `part(form, rows, columns)` and `part(form, array)`.

    Parts are "values", "scales", "factor", "zeros" and "order" [columns], which says for each place of a row the column
    it is of. `expand(values, scales, name)` makes rows of stored values and scales, where that takes less than decoding
    both.
    """

    tensors: Callable[[MatrixFormat, int, int], Mapping[str, Stored]]
    decoders: Mapping[str, Callable[[MatrixFormat, np.ndarray], Rows]]
    expand: Callable[[np.ndarray, np.ndarray, str], Rows] | None = None


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [rows, columns] as files have it, or several, [n, rows, columns].

    `tensors` are the names and arrays of its parts, or of "weight" alone for one without a format.
    """

    form: MatrixFormat | None
    shape: tuple[int, ...]
    tensors: Mapping[str, tuple[str, np.ndarray]]

    def map(self, function: Callable[[StoredMatrix], Rows]) -> Rows | list[Rows]:
        """Returns what `function` makes of the matrix or, in a list, of each of several."""
        if len(self.shape) == 2:
            return function(self)
        each = (
            {part: (name, array[index]) for part, (name, array) in self.tensors.items()}
            for index in range(self.shape[0])
        )
        return [function(replace(self, shape=self.shape[1:], tensors=tensors)) for tensors in each]

    def list_values(self) -> Rows:
        """Returns the values [rows, columns], in the matrix's order of columns if it has one."""
        decoded = self._decode("values")
        if decoded.shape != self.shape:  # filled up to whole words
            decoded = decoded[: self.shape[0], : self.shape[1]]
        return np.asarray(decoded)[:, self.find_order()] if "order" in self.tensors else decoded

    def list_scales(self, groups: int) -> Rows:
        """Returns the scales [rows, groups], of groups that each lie in one of the files'.

        Raises WeightsError, naming the tensor, for scales that no matrix can have.
        """
        form, (name, array) = self._get_form(), self.tensors["scales"]
        if form.scale_dtype == "bfloat16":
            return self._spread(list_powers(array, name), groups)
        scales = self._spread(self._decode("scales"), groups).astype(np.float32)
        if "factor" in self.tensors:
            scales = scales / self._find_factor() if form.divides else scales * self._find_factor()
        # An 8-bit float is 0 where the numbers of a group are all too small beside those of others.
        if not np.isfinite(scales).all() or not (form.factor or scales.all()):
            raise WeightsError(f"{_NO_SCALE}; download the file again", field=name)
        return scales

    def list_zeros(self, groups: int) -> Rows:
        """Returns the zero points [rows, groups] int8."""
        return self._spread(self._decode("zeros"), groups)

    def find_order(self) -> np.ndarray:
        """Returns the columns sorted by their group [columns] i32; each group has as many as the format says."""
        form, (name, _) = self._get_form(), self.tensors["order"]
        groups = np.asarray(self._decode("order"))
        order = np.argsort(groups, kind="stable").astype(np.int32)
        size = form.block[1] or len(groups)
        if not np.array_equal(groups[order], np.arange(len(groups)) // size):
            raise WeightsError(f"has groups that are not of {size} columns each", field=name)
        return order

    def expand(self) -> Rows:
        """Returns the numbers [rows, columns] that are meant."""
        if self.form is None:
            return self.tensors["weight"][1].astype(np.float32)
        expand, columns = PACKINGS[self.form.packing or ""].expand, self.shape[1]
        if expand is not None and columns % MX_BLOCK == 0:
            name, scales = self.tensors["scales"]
            return expand(self.tensors["values"][1], scales, name)
        values = np.asarray(self.list_values()).astype(np.float32)
        values = values - self.list_zeros(columns) if "zeros" in self.tensors else values
        values = values * self.list_scales(columns)
        return values[:, np.argsort(self.find_order())] if "order" in self.tensors else values

    def _get_form(self) -> MatrixFormat:
        assert self.form is not None
        return self.form

    def _decode(self, part: str) -> Rows:
        form = self._get_form()
        return PACKINGS[form.packing or ""].decoders[part](form, self.tensors[part][1])

    def _spread(self, per_group: Rows, groups: int) -> Rows:
        """Returns numbers of the files' blocks for each row, and for each of `groups` groups of equal size."""
        form, (rows, columns) = self._get_form(), self.shape
        block = form.block[0] or rows
        if len(per_group) < rows:
            per_group = np.repeat(np.asarray(per_group), block, axis=0)
        per_group = per_group[:rows]
        if per_group.shape[1] == groups:
            return per_group
        size = form.block[1] or columns
        return np.asarray(per_group)[:, np.arange(groups) * (columns // groups) // size]

    def _find_factor(self) -> np.float32:
        name, array = self.tensors["factor"]
        factor = np.asarray(array, np.float32).reshape(())
        if not np.isfinite(factor) or not factor:
            raise WeightsError(f"{_NO_SCALE}; download the file again", field=name)
        return np.float32(factor)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the values of int32 words [n, m] as unsigned bytes [n, m * 32 / bits]."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)


def _center(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns unsigned values [0, 2**bits) as signed ones, whose zero is the middle."""
    return (values ^ np.uint8(1 << (bits - 1))).view(np.int8) if bits == 8 else values.view(np.int8) - np.int8(8)


def _list_integers(form: MatrixFormat, words: np.ndarray) -> DecodedRows:
    """Returns the values [n, D] int8 of words [n, D * bits / 32]."""
    return DecodedRows(
        words, 32 // form.bits, np.dtype(np.int8), lambda found: _center(unpack(found, form.bits), form.bits)
    )


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


def _awq_values(form: MatrixFormat, array: np.ndarray) -> TransposedRows:
    def decode(words: np.ndarray) -> np.ndarray:
        values = _center(unpack(words, form.bits), form.bits)
        return values.reshape(len(values), -1, 8)[..., _AWQ_PLACES].reshape(len(values), -1)

    matrix = DecodedRows(array, 32 // form.bits, np.dtype(np.int8), decode)
    return TransposedRows(matrix, 0, matrix.shape[1])


def _float4_tensors(values: str, form: MatrixFormat, rows: int, columns: int) -> dict[str, Stored]:
    is_power = form.scale_dtype == "bfloat16"
    stored = {
        "values": Stored(values, (rows, -(-columns // 2)), ("U8",)),
        "scales": Stored(
            form.scale, (rows, form.count_groups(columns)), ("U8", "F8_E8M0") if is_power else ("F8_E4M3",)
        ),
    }
    return stored | ({"factor": Stored(form.factor, (), ("F32",))} if form.factor else {})


def _block_tensors(form: MatrixFormat, rows: int, columns: int) -> dict[str, Stored]:
    """Returns gpt-oss's form of MXFP4."""
    groups = form.count_groups(columns)
    return {
        "values": Stored("_blocks", (rows, groups, MX_BLOCK // 2), ("U8",)),
        "scales": Stored("_scales", (rows, groups), ("U8",)),
    }


def _decode_float4(form: MatrixFormat, array: np.ndarray) -> Rows:
    return list_values(array.reshape(len(array), -1))


def _expand_mxfp4(values: np.ndarray, scales: np.ndarray, name: str) -> Rows:
    return Mxfp4Rows(values.reshape(len(values), -1), as_bytes(scales), name)


PACKINGS = {
    "plain": Packing(_plain_tensors, {"values": lambda form, array: array, "scales": _as_rows, "zeros": _as_rows}),
    "compressed": Packing(
        _compressed_tensors,
        {
            "values": _list_integers,
            "scales": _as_rows,
            "zeros": lambda form, array: _center(unpack(array.T, form.bits), form.bits).T,
            "order": lambda form, array: array,
        },
    ),
    "gptq": Packing(
        _gptq_tensors,
        {
            "values": lambda form, array: _list_integers(form, array.T),
            "scales": lambda form, array: array.T,
            "zeros": _gptq_zeros,
            "order": lambda form, array: array,
        },
    ),
    "awq": Packing(
        _awq_tensors,
        {"values": _awq_values, "scales": lambda form, array: array.T, "zeros": _awq_values},
    ),
    "mxfp4": Packing(partial(_float4_tensors, "weight_packed"), {"values": _decode_float4}, _expand_mxfp4),
    "mxfp4 blocks": Packing(_block_tensors, {"values": _decode_float4}, _expand_mxfp4),
    "nvfp4": Packing(partial(_float4_tensors, "weight_packed"), {"values": _decode_float4, "scales": _as_rows}),
    "modelopt nvfp4": Packing(partial(_float4_tensors, "weight"), {"values": _decode_float4, "scales": _as_rows}),
}
