"""Parses the header of a safetensors file as if an attacker had written it.

A file is 8 bytes (little-endian length n), n bytes of JSON, then the tensors' bytes:
`{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}`, offsets counted
from the end of the JSON. This parser is stricter than the format: it refuses duplicate and unknown keys.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.core.weights.json_files import parse_json_object
from jaxserve.errors import WeightsError, shorten

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 500_000  # per checkpoint; DeepSeek-V3 has 91,000
_MAX_VALUES = 16 * MAX_TENSORS  # a tensor is an object of three keys, with two short lists
_LENGTH = struct.Struct("<Q")
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

# Every element type of the format: only a few can be loaded, but the extents of all are checked.
_DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `start` to `end` of its file. `dtype` is the format's name ("BF16")."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(data: Any, file: str) -> dict[str, TensorEntry]:
    """Returns the tensors of a safetensors file by name.

    `data` is the whole file as a sliceable buffer (bytes or mmap), of which only the header is read. Raises
    WeightsError (field = `file`) when the file is malformed, truncated or longer than its tensors, and when tensors
    overlap, leave a gap or end beyond the file.
    """
    header_end = _find_header_end(data, file)
    text = bytes(data[_LENGTH.size : header_end])
    if text.count(b"{") > MAX_TENSORS + 2:  # one per tensor, the metadata and the header itself
        raise WeightsError(f"its header lists more than {MAX_TENSORS:,} tensors, which no model has", field=file)
    try:
        header = parse_json_object(text, _MAX_VALUES)
    except ValueError as error:
        raise WeightsError(f"corrupt file: its header {error}", field=file) from error
    _check_metadata(header.pop("__metadata__", {}), file)
    entries = {name: _parse_entry(name, value, header_end, file) for name, value in header.items()}
    _check_extents(entries, header_end, len(data), file)
    return entries


def _find_header_end(data: Any, file: str) -> int:
    size = len(data)
    if size < _LENGTH.size:
        raise WeightsError(f"truncated: {size} bytes do not hold a safetensors header", field=file)
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"corrupt file, or not safetensors: header length {length} exceeds {MAX_HEADER_BYTES} bytes", field=file
        )
    if _LENGTH.size + length > size:
        raise WeightsError(
            f"truncated: the header needs {_LENGTH.size + length} bytes, the file has {size}", field=file
        )
    if data[_LENGTH.size : _LENGTH.size + 1] != b"{":
        raise WeightsError("corrupt file: its header does not begin with '{'", field=file)
    return _LENGTH.size + length


def _check_metadata(metadata: object, file: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError("corrupt file: __metadata__ must map strings to strings", field=file)


def _parse_entry(name: str, value: object, header_end: int, file: str) -> TensorEntry:
    def corrupt(reason: str) -> WeightsError:
        return WeightsError(f"corrupt file: tensor {shorten(name)} {reason}", field=file, value=name)

    if not isinstance(value, dict) or set(value) != _ENTRY_KEYS:
        raise corrupt(f"must have exactly the keys {sorted(_ENTRY_KEYS)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise corrupt(f"has unknown dtype {shorten(dtype)}")
    if not _are_counts(shape):
        raise corrupt(f"has malformed shape {shorten(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(f"has malformed data_offsets {shorten(offsets)}")
    bits = math.prod(shape) * _DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise corrupt(
            f"of shape {shorten(tuple(shape))} and dtype {dtype} does not fill data_offsets {shorten(offsets)}"
        )
    return TensorEntry(dtype, tuple(shape), header_end + offsets[0], header_end + offsets[1])


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_extents(entries: Mapping[str, TensorEntry], header_end: int, size: int, file: str) -> None:
    """Raises WeightsError unless the tensors tile the data: each byte belongs to exactly one."""
    position = header_end
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > size:
            raise WeightsError(
                f"truncated: tensor {shorten(name)} ends at byte {entry.end}, the file at {size}",
                field=file,
                value=name,
            )
        if entry.start != position:
            relation = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise WeightsError(f"corrupt file: tensor {shorten(name)} {relation}", field=file, value=name)
        position = entry.end
    if position != size:
        raise WeightsError(f"corrupt file: {size - position} bytes after the last tensor", field=file)
