"""Heads of GGUF files that somebody made to do harm, or cut."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from jaxserve.errors import WeightsError
from jaxserve.gguf_file import CONTROL, list_end_tokens, open_gguf

HUGE = 2**60
U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes, size: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if size is None else size) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NAME = key("general.architecture", STRING, text("llama"))
KEYS = [NAME, key("llama.block_count", U32, struct.pack("<I", 1)), key("a", ARRAY, struct.pack("<IQ3i", 5, 3, 1, 2, 3))]
INFOS = [info("one"), info("two", (8,), offset=32)]


def make(
    keys: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    data: int = 64,
) -> bytes:
    keys, infos = KEYS if keys is None else keys, INFOS if infos is None else infos
    counts = (len(infos) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join([*keys, *infos])
    return head + bytes(-len(head) % 32) + bytes(data)


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: the counts at its beginning"),
    "magic": (make(magic=b"GGML"), "begins with b'GGML'"),
    "old version": (make(version=1), "version 1 is not read"),
    "big-endian": (make(version=3 << 24), "version 50331648 is not read"),
    "many tensors": (make(num_tensors=HUGE), "holds 1152921504606846976 tensors"),
    "many keys": (make(num_keys=HUGE), "holds 1152921504606846976 keys"),
    "one key more": (make(num_keys=4), "corrupt file|truncated"),
    "one key less": (make(num_keys=2), "corrupt file|truncated"),
    "one tensor more": (make(num_tensors=3), "corrupt file|truncated"),
    "one tensor less": (make(num_tensors=1), "bytes follow the last tensor"),
    "long name of a key": (make([text("a", HUGE)]), "truncated: key 0 needs 1152921504606846976 bytes"),
    "long text": (make([key("k", STRING, text("", HUGE))]), "truncated: key 'k' needs 1152921504606846976 bytes"),
    "long array": (make([key("k", ARRAY, struct.pack("<IQ", 5, HUGE))]), "'k' has 1152921504606846976 items"),
    "long list": (make([key("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]), "'k' has 1152921504606846976 items"),
    "array longer than the file": (
        make([key("k", ARRAY, struct.pack("<IQ", 12, 2**22))]),
        "truncated: key 'k' needs 33554432 bytes",
    ),
    "list longer than the file": (
        make([key("k", ARRAY, struct.pack("<IQ", STRING, 2**22))]),
        "truncated: key 'k', item|corrupt file: key 'k', item",
    ),
    "array of arrays": (make([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "'k' has values of the unknown type 9"),
    "unknown type of a value": (make([key("k", 13, b"")]), "'k' has values of the unknown type 13"),
    "no UTF-8 in a name": (make([key(b"\xff", U32, bytes(4))]), r"key 0 is no UTF-8 \(byte 32 of the file\)"),
    "no UTF-8 in a text": (make([key("k", STRING, text(b"ab\xc3"))]), "key 'k' is no UTF-8"),
    "no UTF-8 in a list": (
        make([key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xfe"))]),
        "key 'k', item 1, is no UTF-8",
    ),
    "doubled key": (make([*KEYS, NAME]), "the key 'general.architecture' stands there twice"),
    "doubled tensor": (make(infos=[info("one"), info("one", offset=32)]), "tensor 'one' stands there twice"),
    "no axes": (make(infos=[info("one", ())]), "tensor 'one' has 0 axes"),
    "many axes": (make(infos=[text("one") + struct.pack("<I", 2**31)]), "tensor 'one' has 2147483648 axes"),
    "long axis": (make(infos=[info("one", (HUGE, HUGE))]), r"truncated: tensor 'one' of shape \(1152921504606846976"),
    "unknown type": (make(infos=[info("one", kind=99)]), "tensor 'one' has the type number 99; read are BF16, "),
    "type that is not read": (make(infos=[info("one", kind=19)]), "tensor 'one' has the type IQ1_S; read are BF16, "),
    "cut block": (make(infos=[info("one", (31,), 8)]), "has rows of 31 numbers, and blocks of Q8_0 have 32"),
    "overlap": (make(infos=[info("one"), info("two", (8,))]), "tensor 'two' is at offset 0, .* ends at 32"),
    "gap": (make(infos=[info("one"), info("two", (8,), offset=64)], data=96), "'two' is at offset 64"),
    "offset": (make(infos=[info("one", offset=HUGE)]), "truncated: tensor 'one' of shape"),
    "no numbers": (make(data=0), r"truncated: tensor 'one' of shape \(2, 4\) ends at byte"),
    "bytes at the end": (make(data=128), "64 bytes follow the last tensor"),
    "alignment": (make([key("general.alignment", U32, struct.pack("<I", 24))]), "general.alignment is 24"),
    "alignment of 0": (make([key("general.alignment", U32, bytes(4))]), "general.alignment is 0"),
    "alignment as text": (make([key("general.alignment", STRING, text("x"))]), "general.alignment is 'x'"),
    "parts": (make([*KEYS, key("split.count", U32, struct.pack("<I", 7))]), "split.count says 7 parts, and the name 1"),
    "tensors of parts": (
        make([*KEYS, key("split.tensors.count", U32, struct.pack("<I", 7))]),
        "hold 2 tensors, and split.tensors.count is 7",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_named_before_memory_is_taken(name: str, tmp_path: Path) -> None:
    data, words = BAD[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    open_gguf(tmp_path_with_good(tmp_path))  # imports what it imports
    tracemalloc.start()
    with pytest.raises(WeightsError, match=words) as caught:
        open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.field == str(path)
    assert peak < 2**20


def tmp_path_with_good(folder: Path) -> Path:
    path = folder / "good.gguf"
    path.write_bytes(make())
    return path


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    file = open_gguf(tmp_path_with_good(tmp_path))
    assert file.metadata == {"general.architecture": "llama", "llama.block_count": 1, "a": [1, 2, 3]}
    assert {name: (each.type, each.shape) for name, each in file.tensors.items()} == {
        "one": ("F32", (2, 4)),
        "two": ("F32", (8,)),
    }
    assert file.tensors["two"].start - file.tensors["one"].start == 32


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path_with_good(tmp_path)
    assert open_gguf(path) is open_gguf(path)
    path.write_bytes(make([NAME]))
    assert open_gguf(path).metadata == {"general.architecture": "llama"}


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    whole, path = make(), tmp_path / "model.gguf"
    for size in range(len(whole)):
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError):
            open_gguf(path)


def test_changed_bytes_are_an_error_or_another_model(tmp_path: Path) -> None:
    rng, whole, path = random.Random(1), make(), tmp_path / "model.gguf"
    faults = 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            open_gguf(path)
        except WeightsError:
            faults += 1
    assert 300 < faults < 1000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No such file"):
        open_gguf(tmp_path / "model.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(WeightsError, match="directory"):
        open_gguf(tmp_path / "folder.gguf")


def test_answers_end_where_keys_or_the_usual_tokens_say() -> None:
    tokens, kinds = ["a", "<|end|>", "<|eot_id|>", "<eos>"], [1, CONTROL, 1, CONTROL]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_id": 3}
    assert list_end_tokens(metadata) == [3, 1]
    assert list_end_tokens(metadata | {"tokenizer.ggml.eot_token_id": 0}) == [3, 0]
    assert list_end_tokens(metadata | {"general.architecture": "gpt-oss"}) == [3]
    assert list_end_tokens({}) == []
