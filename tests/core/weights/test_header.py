"""Headers as an attacker, a broken disk or an interrupted download would leave them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from jaxserve.core.weights.header import MAX_HEADER_BYTES, parse_header
from jaxserve.errors import WeightsError
from tests.core.weights.checkpoints import BF16, raw_file
from tests.examples import scale_examples

GOOD = save(
    {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, BF16), "empty": np.ones((0, 2), np.int8)}
)
HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_good_file() -> None:
    entries = parse_header(GOOD, "f")
    assert {name: (e.dtype, e.shape) for name, e in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
        "empty": ("I8", (0, 2)),
    }
    np.testing.assert_array_equal(
        np.frombuffer(GOOD[entries["a"].start : entries["a"].end], np.float32), np.arange(6, dtype=np.float32)
    )
    assert max(e.end for e in entries.values()) == len(GOOD)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, HEADER_END - 1, HEADER_END, HEADER_END + 1, len(GOOD) - 1])
def test_truncated_anywhere(size: int) -> None:
    with pytest.raises(WeightsError, match="truncated") as caught:
        parse_header(GOOD[:size], "some.safetensors")
    assert caught.value.field == "some.safetensors"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD + b"\0", "1 bytes after the last tensor"),
        (struct.pack("<Q", 2**64 - 1) + GOOD[8:], "header length 18446744073709551615 exceeds"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + GOOD[8:], "exceeds"),
        (struct.pack("<Q", MAX_HEADER_BYTES) + GOOD[8:], "truncated"),
        (raw_file(b""), "does not begin with"),
        (raw_file(b" {}"), "does not begin with"),
        (raw_file(b"[]"), "does not begin with"),
        (raw_file(b"{"), "not JSON"),
        (raw_file(b"{}\0"), "not JSON"),
        (raw_file(b'{"a": \xff}'), "not UTF-8"),
        (raw_file(b'{"a":' * 100_000), "nested too deeply"),
        (raw_file(b'{"a": {"shape": [' + b"9" * 5000 + b"]}}"), "5000 digits"),
        (raw_file(b'{"a":1,"a":1}'), "key 'a' twice"),
        (raw_file({"__metadata__": {"k": 1}}), "__metadata__"),
        (raw_file({"__metadata__": []}), "__metadata__"),
        (raw_file({"a": 3}), "exactly the keys"),
        (raw_file({"a": {"dtype": "F32", "shape": [1]}}, b"1234"), "exactly the keys"),
        (raw_file({"a": {**entry(), "strides": [1]}}, b"1234"), "exactly the keys"),
        (raw_file({"a": entry(dtype="F31")}, b"1234"), "unknown dtype 'F31'"),
        (raw_file({"a": entry(dtype=["F32"])}, b"1234"), "unknown dtype"),
        (raw_file({"a": entry(shape=4)}, b"1234"), "malformed shape"),
        (raw_file({"a": entry(shape=[-1])}, b"1234"), "malformed shape"),
        (raw_file({"a": entry(shape=[1.0])}, b"1234"), "malformed shape"),
        (raw_file({"a": entry(shape=[True])}, b"1234"), "malformed shape"),
        (raw_file({"a": entry(shape=[2**62, 2**62])}, b"1234"), "does not fill"),
        (raw_file({"a": entry(dtype="F4", shape=[1])}, b"1234"), "does not fill"),
        (raw_file({"a": entry(offsets=[4, 0])}, b"1234"), "malformed data_offsets"),
        (raw_file({"a": entry(offsets=[0, 4, 8])}, b"1234"), "malformed data_offsets"),
        (raw_file({"a": entry(offsets=[-4, 0])}, b"1234"), "malformed data_offsets"),
        (raw_file({"a": entry(offsets=["0", "4"])}, b"1234"), "malformed data_offsets"),
        (raw_file({"a": entry(offsets=[0, 3])}, b"1234"), "does not fill"),
        (raw_file({"a": entry(offsets=[2**63, 2**63 + 4])}, b"1234"), "truncated: tensor 'a' ends"),
        (raw_file({"a": entry(offsets=[4, 8])}, b"12345678"), "'a' leaves a gap"),
        (raw_file({"a": entry(), "b": entry()}, b"1234"), "'b' overlaps"),
        (raw_file({"a": entry(), "b": entry(shape=[2], offsets=[2, 10])}, b"1234567890"), "'b' overlaps"),
        (raw_file({"a": entry(), "b": entry(shape=[0], offsets=[2, 2])}, b"1234"), "overlaps"),
        (raw_file({}, b"1234"), "4 bytes after"),
    ],
)
def test_corrupt(data: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        parse_header(data, "some.safetensors")
    assert caught.value.field == "some.safetensors"
    assert len(str(caught.value)) < 400  # never echoes a whole hostile header


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)
COUNTS = st.lists(st.integers(-1, 9) | JSON, max_size=3)
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "I8", "F4", "F64", "X"]) | JSON, "shape": COUNTS, "data_offsets": COUNTS},
    optional={"more": JSON},
)
FLIPS = st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4)


def accepts_alike(data: bytes) -> None:
    """The parser raises WeightsError or nothing, and accepts only what the format's own library reads the same way."""
    try:
        ours = parse_header(data, "f")
    except WeightsError:
        return
    theirs = dict(deserialize(data))
    assert {name: list(e.shape) for name, e in ours.items()} == {name: t["shape"] for name, t in theirs.items()}
    for name, e in ours.items():
        assert data[e.start : e.end] == bytes(theirs[name]["data"])


@settings(max_examples=scale_examples(300), deadline=None)
@given(st.binary(max_size=64) | st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3), st.binary(max_size=16))
def test_any_header(header: object, data: bytes) -> None:
    accepts_alike(raw_file(header, data))


@settings(max_examples=scale_examples(300), deadline=None)
@given(FLIPS, st.integers(0, len(GOOD)))
def test_flipped_bytes(flips: list[tuple[int, int]], size: int) -> None:
    data = bytearray(GOOD)
    for position, value in flips:
        data[position] = value
    accepts_alike(bytes(data))
    accepts_alike(bytes(data[:size]))


@settings(max_examples=scale_examples(100), deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
        st.lists(st.integers(0, 4), max_size=3),
        max_size=5,
    )
)
def test_accepts_what_the_library_writes(shapes: dict[str, list[int]]) -> None:
    shapes.pop("__metadata__", None)
    data = save({name: np.zeros(shape, BF16) for name, shape in shapes.items()})
    assert {name: list(e.shape) for name, e in parse_header(data, "f").items()} == shapes
    with pytest.raises(SafetensorError):
        deserialize(data + b"\0")
