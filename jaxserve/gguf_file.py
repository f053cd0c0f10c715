"""Parses the head of a GGUF file as if an attacker had written it: metadata and places of tensors, no numbers.

A file is the magic "GGUF", a version, the counts of tensors and of keys, the keys with their values, the tensors'
names, dimensions, types and offsets, and then, from an aligned place on, the tensors' bytes. Numbers are little-endian.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import MissingPackageError, WeightsError, shorten
from jaxserve.files import open_regular

SUFFIX = ".gguf"
MAX_HEAD_BYTES = 2**28  # vocabularies of published files take some megabytes
MAX_ITEMS = 2**22  # of one array, as of a vocabulary
_MAX_KEYS = 2**16
_MAX_TENSORS = 500_000
_MAX_AXES = 4
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # unless `general.alignment` says otherwise
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_LENGTH = struct.Struct("<Q")
_COUNTS = struct.Struct("<4sIQQ")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
CONTROL = 3  # the kind of special tokens
# What models end their turns with. Many files name only the end of a text.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
TYPES = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "IQ4_NL", "IQ4_XS"}) | {
    f"Q{bits}_K" for bits in range(2, 7)
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its type ("Q4_K"), its shape in numpy's order, and its bytes `start` to `end` in `data`.

    The numbers of a row lie in blocks of `block` numbers, of `block_bytes` bytes each.
    """

    type: str
    shape: tuple[int, ...]
    block: int
    block_bytes: int
    start: int
    end: int
    file: str
    data: mmap.mmap


@dataclass(frozen=True)
class GGUFFile:
    """The metadata of the first part by key, and the tensors of all parts by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return str(path).lower().endswith(SUFFIX)


def list_parts(path: Path) -> list[Path]:
    """Returns all files of a model whose first file is `path`."""
    found = _SHARD.search(path.name)
    if found is None:
        return [path]
    if int(found[1]) != 1:
        message = f"is part {int(found[1])} of {int(found[2])}; give the first, whose name has -00001-of-"
        raise WeightsError(message, field=str(path))
    stem = path.name[: found.start()]
    return [path.with_name(f"{stem}-{number + 1:05d}-of-{found[2]}{SUFFIX}") for number in range(int(found[2]))]


def open_gguf(path: Path) -> GGUFFile:
    """Returns what a GGUF file, and the parts that belong to it, say about metadata and tensors.

    Raises:
        WeightsError: a file is missing, truncated or malformed, or a tensor has a type that is not read. `field` is the
            file, and the message names the key or the tensor. Nothing is allocated by a length before the file is known
            to hold as much.
        MissingPackageError: the package `gguf` is not installed.
    """
    path = path.resolve() if path.exists() else path
    marks = tuple((part, *_read_mark(part)) for part in list_parts(path))
    return _parse_parts(marks)


def _read_mark(part: Path) -> tuple[int, int]:
    try:
        status = os.stat(part)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", field=str(part)) from error
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _parse_parts(marks: tuple[tuple[Path, int, int], ...]) -> GGUFFile:
    """Parses files, once for each size and time of change."""
    (first, *_), *others = marks
    metadata, tensors = _Head(first).parse()
    if metadata.get("split.count", 1) not in (0, 1, len(marks)):
        message = f"split.count says {shorten(metadata['split.count'])} parts, and the name {len(marks)}"
        raise WeightsError(message, field=str(first))
    for part, *_ in others:
        found = _Head(part).parse()[1]
        doubled = tensors.keys() & found.keys()
        if doubled:
            raise WeightsError(f"tensor {shorten(min(doubled))} stands in two parts", field=str(part))
        tensors |= found
    wanted = metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise WeightsError(
            f"the parts hold {len(tensors)} tensors, and split.tensors.count is {wanted}", field=str(first)
        )
    return GGUFFile(first, metadata, tensors)


def list_end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the ids that end an answer: those that keys name and, without a key for turns, the usual end of one."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = [metadata[key] for key in keys if isinstance(metadata.get(key), int)]
    if "tokenizer.ggml.eot_token_id" not in metadata and metadata.get("general.architecture") != "gpt-oss":
        tokens, kinds = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
        if isinstance(tokens, list) and isinstance(kinds, list):
            pairs = enumerate(zip(tokens, kinds, strict=False))
            ids += [index for index, (text, kind) in pairs if kind == CONTROL and text in _TURN_ENDS]
    return list(dict.fromkeys(ids))


def load_types() -> dict[int, tuple[str, int, int]]:
    """Returns name, numbers in a block and bytes of a block of each type that the format has, by its number."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        message = f"GGUF files need the package gguf, which cannot be imported ({error})"
        raise MissingPackageError(f"{message}; pip install 'gguf>=0.19', or this project's extra `gguf`") from error
    return {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


class _Head:
    """A place in a mapped file that moves over its head."""

    def __init__(self, path: Path) -> None:
        self._file, self._at = str(path), 0
        try:
            with open_regular(path) as stream:
                size = stream.seek(0, 2)
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise WeightsError(f"cannot be read: {reason}", field=self._file) from error
        self._size, self._limit = size, min(size, MAX_HEAD_BYTES)

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Returns metadata and tensors."""
        magic, version, num_tensors, num_keys = self._unpack(_COUNTS, "the counts at its beginning")
        if magic != b"GGUF":
            raise self._fault(f"it begins with {magic!r}, and GGUF files with b'GGUF'", corrupt=False)
        if version not in _VERSIONS:
            raise self._fault(f"version {version} is not read, only 2 and 3, little-endian", corrupt=False)
        for name, count, most in (("tensors", num_tensors, _MAX_TENSORS), ("keys", num_keys, _MAX_KEYS)):
            if count > most:
                raise self._fault(f"it says that it holds {count} {name}; no model has more than {most:,}")
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._read_string(f"key {index}")
            if key in metadata:
                raise self._fault(f"the key {shorten(key)} stands there twice")
            metadata[key] = self._read_value(*self._unpack(struct.Struct("<I"), f"key {shorten(key)}"), key)
        infos = [self._read_info(index) for index in range(num_tensors)]
        return metadata, self._place(infos, metadata.get("general.alignment", _ALIGNMENT))

    def _fault(self, reason: str, *, corrupt: bool = True) -> WeightsError:
        return WeightsError(f"{'corrupt file: ' if corrupt else ''}{reason}", field=self._file)

    def _claim(self, size: int, what: str) -> int:
        """Moves over `size` bytes, and returns where they begin."""
        start, self._at = self._at, self._at + size
        if self._at <= self._limit:
            return start
        if self._at > self._size:
            message = f"truncated: {what} needs {size} bytes from byte {start} on, and the file has {self._size}"
            raise WeightsError(message, field=self._file)
        raise self._fault(f"{what} ends beyond the first {MAX_HEAD_BYTES} bytes, where no head is longer")

    def _unpack(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        start = self._claim(form.size, what)
        return form.unpack_from(self._data or b"", start)

    def _read_string(self, what: str) -> str:
        (size,) = self._unpack(_LENGTH, what)
        start = self._claim(size, what)
        try:
            return str((self._data or b"")[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self._fault(f"{what} is no UTF-8 (byte {start + error.start} of the file)") from error

    def _read_value(self, kind: int, key: str) -> Any:
        what = f"key {shorten(key)}"
        if kind == _STRING:
            return self._read_string(what)
        if kind != _ARRAY:
            return self._read_scalars(kind, 1, what)[0]
        kind, count = self._unpack(struct.Struct("<IQ"), what)
        if count > MAX_ITEMS:
            raise self._fault(f"{what} has {count} items; no model has more than {MAX_ITEMS:,}")
        if kind == _STRING:
            return [self._read_string(f"{what}, item {index},") for index in range(count)]
        return self._read_scalars(kind, count, what)

    def _read_scalars(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self._fault(f"{what} has values of the unknown type {kind}")
        found = list(self._unpack(struct.Struct(f"<{count}{_SCALARS[kind]}"), what))
        return [bool(value) for value in found] if kind == _BOOL else found

    def _read_info(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._read_string(f"the name of tensor {index}")
        what = f"tensor {shorten(name)}"
        (axes,) = self._unpack(struct.Struct("<I"), what)
        if not 1 <= axes <= _MAX_AXES:
            raise self._fault(f"{what} has {axes} axes; 1 to {_MAX_AXES} are possible")
        *shape, kind, offset = self._unpack(struct.Struct(f"<{axes}QIQ"), what)
        return name, tuple(reversed(shape)), kind, offset

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> dict[str, GGUFTensor]:
        """Returns the tensors, which must fill the file one after the other from the aligned end of the head on."""
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {shorten(alignment)}, which is no power of two up to 2^20")
        types, tensors = load_types(), dict[str, GGUFTensor]()
        base, place = -(-self._at // alignment) * alignment, 0
        for name, shape, kind, offset in infos:
            what = f"tensor {shorten(name)}"
            if name in tensors:
                raise self._fault(f"{what} stands there twice")
            type_name, block, block_bytes = types.get(kind, (f"number {kind}", 1, 1))
            if type_name not in TYPES:
                raise self._fault(
                    f"{what} has the type {type_name}; read are {', '.join(sorted(TYPES))}", corrupt=False
                )
            if shape[-1] % block:
                raise self._fault(f"{what} has rows of {shape[-1]} numbers, and blocks of {type_name} have {block}")
            size = math.prod(shape) // block * block_bytes
            if base + offset + size > self._size:
                message = f"{what} of shape {shape} ends at byte {base + offset + size}, the file at {self._size}"
                raise WeightsError(f"truncated: {message}", field=self._file)
            if offset != place or self._data is None:
                raise self._fault(f"{what} is at offset {offset}, and the one before it ends at {place}")
            tensors[name] = GGUFTensor(
                type_name, shape, block, block_bytes, base + offset, base + offset + size, self._file, self._data
            )
            place += -(-size // alignment) * alignment
        if self._size - base - place >= alignment:
            raise self._fault(f"{self._size - base - place} bytes follow the last tensor")
        return tensors
