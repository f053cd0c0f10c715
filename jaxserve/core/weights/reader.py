"""Reads the tensors of a safetensors checkpoint as views of memory-mapped files; opening reads only headers."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxserve.core.weights.file_formats import INDEX_FILE, SINGLE_FILE, describe_foreign
from jaxserve.core.weights.header import MAX_TENSORS, TensorEntry, parse_header
from jaxserve.core.weights.json_files import parse_json_object
from jaxserve.errors import WeightsError, shorten
from jaxserve.files import open_regular, read_regular
from jaxserve.gguf_file import is_gguf

MAX_INDEX_BYTES = 2**27  # DeepSeek-V3's has 9 MB
_MAX_NAMES = 4  # that an error lists
LOADABLE_DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
INTEGER_DTYPES: Mapping[str, np.dtype] = {  # of tables of token ids, never of weights
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
_QUANTIZED_DTYPES: Mapping[str, np.dtype] = {  # of values, often packed, and of scales
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_READABLE_DTYPES = {**LOADABLE_DTYPES, **INTEGER_DTYPES, **_QUANTIZED_DTYPES}


@dataclass(frozen=True)
class _Location:
    entry: TensorEntry
    file: str
    data: mmap.mmap


class Checkpoint(Protocol):
    """All tensors of one checkpoint by name, whatever its format."""

    path: Path

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape of a tensor; KeyError for an unknown name."""

    def count_bytes(self, name: str) -> int:
        """Returns the bytes of a tensor in its file."""

    def file(self, name: str) -> str:
        """Returns the path of the file that has a tensor."""

    def dtype_name(self, name: str) -> str:
        """Returns the dtype that `read` gives, as safetensors names it ("BF16")."""

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor, or a matrix whose rows are expanded where it is indexed; read-only.

        Bytes are read when they are used.
        """

    def prefetch(self, name: str) -> None:
        """Asks the system to read the tensor's bytes from disk soon."""

    def release(self, name: str) -> None:
        """Tells the system that the tensor's bytes are not needed soon."""


class SafetensorsCheckpoint:
    """All tensors of one checkpoint by name. The files stay mapped while this object or one of its views lives."""

    def __init__(self, path: Path, locations: Mapping[str, _Location]) -> None:
        self.path = path
        self._locations = locations

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._locations)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape of a tensor; KeyError for an unknown name."""
        return self._locations[name].entry.shape

    def count_bytes(self, name: str) -> int:
        """Returns the bytes of a tensor."""
        entry = self._locations[name].entry
        return entry.end - entry.start

    def file(self, name: str) -> str:
        """Returns the path of the file that has a tensor."""
        return self._locations[name].file

    def dtype_name(self, name: str) -> str:
        """Returns the format's name of the stored dtype, such as "BF16"."""
        return self._locations[name].entry.dtype

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor as a read-only view of the mapped file, whose bytes are read when they are used.

        The dtype must be one that weights, their parts or tables have (KeyError otherwise). The view may be unaligned.
        """
        location = self._locations[name]
        entry, dtype = location.entry, _READABLE_DTYPES[location.entry.dtype]
        count = (entry.end - entry.start) // dtype.itemsize
        if count == 0:
            return np.empty(entry.shape, dtype)
        return np.frombuffer(location.data, dtype, count, offset=entry.start).reshape(entry.shape)

    def prefetch(self, name: str) -> None:
        """Asks the system to read the tensor's bytes from disk soon; views are valid with or without it."""
        self._advise(name, "MADV_WILLNEED")

    def release(self, name: str) -> None:
        """Tells the system that the tensor's bytes are not needed soon and can leave this process's memory."""
        self._advise(name, "MADV_DONTNEED")

    def _advise(self, name: str, advice: str) -> None:
        if not hasattr(mmap, advice):  # systems without madvise only lose the hint
            return
        location = self._locations[name]
        start = location.entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        length = location.entry.end - start
        if length > 0:
            location.data.madvise(getattr(mmap, advice), start, length)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists, in the directory `path`.

    If `path` is a GGUF file, opens it and the parts that belong to it.

    The tensors of what follows a pooler are in folders, whose names are in front of theirs: `2_Dense/linear.bias`.

    Raises WeightsError (field = the file) when files are missing, truncated or corrupt; when both files exist and the
    index does not list the single file; and when the index and the shards disagree: a listed tensor is not in its
    shard, a tensor is in two shards, or a shard holds a tensor that the index does not list.
    """
    if is_gguf(path):
        from jaxserve.core.weights.gguf_checkpoint import open_gguf_checkpoint

        return open_gguf_checkpoint(path)
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if index.exists():
        weight_map = _read_weight_map(index)
        if single.exists() and SINGLE_FILE not in weight_map.values():
            message = f"{SINGLE_FILE} and {INDEX_FILE} are both there; remove the one that is out of date"
            raise WeightsError(message, field=str(path))
        return SafetensorsCheckpoint(path, _open_shards(path, weight_map, str(index)) | _open_modules(path))
    if single.exists():
        return SafetensorsCheckpoint(path, _map_file(single) | _open_modules(path))
    raise WeightsError(_describe_missing(path), field=str(path))


def open_safetensors(file: Path) -> SafetensorsCheckpoint:
    """Opens one safetensors file of any name; WeightsError (field = the file) as `open_checkpoint`."""
    return SafetensorsCheckpoint(file, _map_file(file))


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the checkpoint at `path`, from the files' headers only."""
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.shape(name) for name in checkpoint.names}


def _describe_missing(path: Path) -> str:
    reason = describe_foreign(path) or "weights are read in safetensors only"
    return f"there is neither {SINGLE_FILE} nor {INDEX_FILE}; {reason}"


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = parse_json_object(read_regular(index, MAX_INDEX_BYTES), 2 * MAX_TENSORS + 1000).get("weight_map")
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", field=str(index)) from error
    except ValueError as error:
        raise WeightsError(f"corrupt index: it {error}", field=str(index)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError("corrupt index: weight_map must be an object that is not empty", field=str(index))
    for name, shard in weight_map.items():
        # an index must not open files outside the directory
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or {"/", "\\", "\0"} & set(shard):
            message = f"tensor {shorten(name)} is listed in {shorten(shard)}, which is no shard of this directory"
            raise WeightsError(f"corrupt index: {message}", field=str(index), value=name)
    return weight_map


def _open_shards(path: Path, weight_map: Mapping[str, str], index: str) -> dict[str, _Location]:
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        raise WeightsError(
            f"{len(missing)} of {len(shards)} shards that the index lists are missing; download them: "
            f"{list_names(missing)}",
            field=str(path / missing[0]),
        )
    locations: dict[str, _Location] = {}
    for shard in shards:
        found = _map_file(path / shard)
        if len(locations) + len(found) > MAX_TENSORS:
            raise WeightsError(f"the shards hold more than {MAX_TENSORS:,} tensors, which no model has", field=index)
        for name, location in found.items():
            if name in locations:
                first = Path(locations[name].file).name
                message = f"tensor {shorten(name)} stands in two shards, {first} and {shard}"
                raise WeightsError(message, field=location.file, value=name)
            locations[name] = location
    for name, shard in weight_map.items():
        if name not in locations or Path(locations[name].file).name != shard:
            raise WeightsError(
                f"tensor {shorten(name)} is missing, though {INDEX_FILE} lists it here",
                field=str(path / shard),
                value=name,
            )
    unlisted = sorted(locations.keys() - weight_map.keys())
    if unlisted:
        message = f"the shards hold {len(unlisted)} tensors that the index does not list: {list_names(unlisted)}"
        raise WeightsError(message, field=index, value=unlisted[0])
    return locations


def _open_modules(path: Path) -> dict[str, _Location]:
    files = sorted(file for kind in ("Dense", "LayerNorm") for file in path.glob(f"[0-9]*_{kind}/{SINGLE_FILE}"))
    return {f"{file.parent.name}/{name}": found for file in files for name, found in _map_file(file).items()}


def _map_file(file: Path) -> dict[str, _Location]:
    try:
        with open_regular(file) as stream:
            # An empty file cannot be mapped, and has no header either.
            empty = stream.seek(0, 2) == 0
            data = None if empty else mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightsError(f"cannot be read: {reason}", field=str(file)) from error
    if data is None:
        raise WeightsError("truncated: the file is empty", field=str(file))
    return {name: _Location(entry, str(file), data) for name, entry in parse_header(data, str(file)).items()}


def list_names(names: list[str]) -> str:
    """Returns the first few names for an error message, and how many more there are."""
    shown = ", ".join(shorten(name) for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
