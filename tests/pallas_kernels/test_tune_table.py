"""The tuning table: what it finds, what it refuses, and that nothing in it is dead."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import AttnShape, KVSpec, prepare_batch
from pallas_kernels.targets import TARGETS
from pallas_kernels.tune import table
from pallas_kernels.tune.search import PARTS
from pallas_kernels.tune.table import DATA, KERNELS, Entry, TuneKey, lookup, read_entries

KEY = TuneKey(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=64,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    window=False,
    tokens=256,
    max_len=8192,
)
KIND, KERNEL = "NVIDIA H200", "gpu_decode"
VERSION = KERNELS[KERNEL]
FIGURES = {
    "us": 12.5,
    "formula_us": 13.0,
    "tried": 9,
    "gb_per_s": 3000.0,
    "jax": "0.12.0.1",
    "driver": "580",
    "date": "2026-11-21",
}


def make_raw(**changes: Any) -> dict[str, Any]:
    entry = {"kernel": KERNEL, "version": VERSION, "key": asdict(KEY), "config": {"stages": 3}, "measured": None}
    return entry | changes


def make_entry(key: TuneKey = KEY, **changes: Any) -> dict[str, Any]:
    return make_raw(key=asdict(key), **changes)


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    """Tables are read once per process."""
    read_entries.cache_clear()
    table._log_miss.cache_clear()
    yield
    read_entries.cache_clear()


def write(directory: Path, *entries: Any, text: str | None = None) -> Path:
    path = directory / KIND / f"{KERNEL}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries) if text is None else text)
    return directory


def find(directory: Path, key: TuneKey = KEY) -> dict[str, Any] | None:
    return lookup(KERNEL, KIND, key, directory=directory)


def test_an_equal_key_is_found_among_near_ones(tmp_path: Path) -> None:
    near = make_entry(replace(KEY, tokens=128), config={"stages": 2})
    write(tmp_path, near, make_entry(measured=FIGURES))
    assert find(tmp_path) == {"stages": 3}


def test_the_nearest_bucket_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        make_entry(replace(KEY, tokens=64), config={"stages": 1}),
        make_entry(replace(KEY, tokens=256, max_len=16384), config={"stages": 2}),
    )
    assert find(tmp_path, replace(KEY, tokens=48)) == {"stages": 1}
    assert find(tmp_path) == {"stages": 2}
    assert find(tmp_path, replace(KEY, tokens=4)) is None, "a factor of 16 away"


def test_the_entry_of_the_context_is_found(tmp_path: Path) -> None:
    contexts = (32768, 512, 4096)  # not in the order of a file
    write(tmp_path, *(make_entry(replace(KEY, max_len=length), config={"stages": length}) for length in contexts))
    for capacity, nearest in ((512, 512), (1024, 512), (2048, 4096), (8192, 4096), (20480, 32768), (131072, 32768)):
        assert find(tmp_path, replace(KEY, max_len=capacity)) == {"stages": nearest}
    assert find(tmp_path, replace(KEY, max_len=262144)) is None, "a factor of eight away"


@pytest.mark.parametrize("backwards", [False, True])
def test_ties_do_not_depend_on_the_file(tmp_path: Path, backwards: bool) -> None:
    """The shorter context, then fewer tokens: buckets are upper bounds."""
    entries = [
        make_entry(replace(KEY, tokens=tokens, max_len=length), config={"stages": tokens + length})
        for tokens, length in ((128, 4096), (512, 4096), (128, 16384), (512, 16384))
    ]
    write(tmp_path, *(reversed(entries) if backwards else entries))
    assert find(tmp_path) == {"stages": 128 + 4096}


# For each kernel, a field of its configuration and two values.
FIELDS = {
    "gpu_decode": ("min_split_tokens", 256, 1024),
    "gpu_prefill": ("stages", 2, 3),
    "ampere_decode": ("min_split_tokens", 128, 512),
    "ampere_prefill": ("stages", 3, 4),
    "tpu_decode": ("rows_per_step", 4, 16),
    "tpu_prefill": ("tile_tokens", 32, 64),
}


@pytest.mark.parametrize("impl", ["gpu", "ampere", "tpu"])
def test_a_step_is_planned_by_the_entry_of_its_page_table(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity of the table is the context of the key; a decode kernel's bucket counts rows, mixed steps' too."""
    num_rows, num_tokens, page_size = 4, 64, 64

    def read(_: Path, device_kind: str, kernel: str) -> tuple[Entry, ...]:
        name, *values = FIELDS[kernel]
        tokens = num_rows if kernel.endswith("decode") else num_tokens
        key = TuneKey(4, 2, 128, page_size, "bfloat16", "bfloat16", window=False, tokens=tokens, max_len=0)
        return tuple(
            Entry(kernel, KERNELS[kernel], replace(key, max_len=length), {name: value}, None)
            for length, value in zip((4096, 32768), values, strict=True)
        )

    monkeypatch.setattr(table, "read_entries", read)
    for index, length in enumerate((4096, 32768)):
        meta = [np.zeros(dims, np.int32) for dims in ((num_rows, length // page_size), num_rows, num_rows + 1, 3)]
        shape = AttnShape(4, KVSpec(2, 128, page_size, "bfloat16"), "bfloat16")
        options = {"num_tokens": num_tokens, "shape": shape, "max_query_len": None, "impl": f"{impl}_interpret"}
        config = jax.eval_shape(partial(prepare_batch, **options), *meta).work.config
        for kernel in (f"{impl}_decode", f"{impl}_prefill"):
            name, *values = FIELDS[kernel]
            assert getattr(getattr(config, PARTS[kernel]), name) == values[index], kernel


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 64},
        {"num_kv_heads": 4},
        {"head_dim": 64},
        {"page_size": 128},
        {"dtype": "float16"},
        {"kv_dtype": "float8_e4m3fn"},
        {"window": True},
    ],
)
def test_other_shapes_find_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, make_entry())
    assert find(tmp_path, replace(KEY, **changes)) is None


def test_other_versions_and_devices_find_nothing(tmp_path: Path) -> None:
    write(tmp_path, make_entry(), make_entry(replace(KEY, num_heads=16), version=VERSION + 1))
    assert find(tmp_path) is not None and find(tmp_path, replace(KEY, num_heads=16)) is None
    assert lookup(KERNEL, "NVIDIA H100 80GB HBM3", KEY, directory=tmp_path) is None
    assert lookup("gpu_prefill", KIND, KEY, directory=tmp_path) is None
    with pytest.raises(ValueError, match=r"kernel must be one of .*, got 'gpu_decod'"):
        lookup("gpu_decod", KIND, KEY, directory=tmp_path)


def test_a_miss_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="pallas_kernels.tune.table"):
        for _ in range(3):
            assert find(tmp_path) is None
    assert len(caplog.records) == 1 and KERNEL in caplog.text and KIND in caplog.text


def test_what_is_found_is_the_callers_own(tmp_path: Path) -> None:
    write(tmp_path, make_entry())
    found = find(tmp_path)
    assert found is not None
    found["stages"] = 9
    assert find(tmp_path) == {"stages": 3}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (7, r"\[0\]: must be an object"),
        (make_entry(version="1"), r"\[0\]\.version: '1' is of the wrong type"),
        (make_entry(colour="red"), r"\[0\]\.colour: unknown field"),
        ({key: value for key, value in make_entry().items() if key != "config"}, r"\[0\]\.config: missing"),
        (make_raw(key=asdict(KEY) | {"tokens": None}), r"\[0\]\.key\.tokens: None is of the wrong type"),
        (make_raw(key=asdict(KEY) | {"tokens": 0}), r"\[0\]\.key\.tokens: must be at least 1, got 0"),
        (make_raw(key=asdict(KEY) | {"num_heads": True}), r"\[0\]\.key\.num_heads: True is of the wrong type"),
        (make_raw(key=asdict(KEY) | {"max_len": None}), r"\[0\]\.key\.max_len: None is of the wrong type"),
        (make_raw(key={"num_heads": 4}), r"\[0\]\.key\.num_kv_heads: missing"),
        (make_entry(measured=FIGURES | {"us": "fast"}), r"\[0\]\.measured\.us: 'fast' is of the wrong type"),
        (make_entry(measured=FIGURES | {"tflop_per_s": 1.0}), r"\[0\]\.measured: must have one of"),
        (
            make_entry(measured={k: v for k, v in FIGURES.items() if k != "formula_us"}),
            r"\[0\]\.measured\.formula_us: missing",
        ),
        (make_entry(measured={"us": 1.0}), r"\[0\]\.measured: must have one of"),
    ],
)
def test_a_malformed_entry_is_named(tmp_path: Path, entry: Any, message: str) -> None:
    write(tmp_path, entry)
    with pytest.raises(ValueError, match=rf"{KIND}/{KERNEL}\.json{message}"):
        find(tmp_path)


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, text="[{")
    with pytest.raises(ValueError, match=rf"{KIND}/{KERNEL}\.json: not JSON"):
        find(tmp_path)
    read_entries.cache_clear()
    write(tmp_path, text="{}")
    with pytest.raises(ValueError, match="must be a list of entries, got dict"):
        find(tmp_path)


def read_sources() -> str:
    """The code of all kernels."""
    return "".join(
        path.read_text() for room in ("hopper", "ampere", "tpu") for path in (DATA.parents[1] / room).glob("*.py")
    )


def list_dead_entries(directory: Path, sources: str) -> list[str]:
    """Entries that no kernel reads, and why. A kernel's code says its name where it looks itself up."""
    dead = []
    for path in sorted(directory.glob("*/*")):
        where, kind = f"{path.parent.name}/{path.name}", path.parent.name
        if kind not in {target.device_kind for target in TARGETS.values()}:
            dead.append(f"{where}: no target of the gate is a {kind}, so that nothing compiles it")
        elif path.suffix != ".json" or path.stem not in KERNELS:
            dead.append(f"{where}: no kernel of that name has a table")
        elif f'"{path.stem}"' not in sources:
            dead.append(f"{where}: its kernel never looks itself up")
        else:
            dead += [f"{where}: {reason}" for reason in _list_unread(directory, kind, path.stem)]
    return dead


def _list_unread(directory: Path, kind: str, kernel: str) -> Iterator[str]:
    for index, entry in enumerate(read_entries(directory, kind, kernel)):
        if entry.kernel != kernel:
            yield f"entry {index} is of {entry.kernel}"
        elif entry.version != KERNELS[kernel]:
            yield f"entry {index} is of version {entry.version}, the kernel has {KERNELS[kernel]}"
        elif lookup(kernel, kind, entry.key, directory=directory) != entry.config:
            yield f"entry {index} is never found: another has its key"


def test_no_entry_that_ships_is_dead() -> None:
    assert list_dead_entries(DATA, read_sources()) == []


def test_dead_entries_are_found(tmp_path: Path) -> None:
    write(tmp_path, make_entry(), make_entry(config={"stages": 4}), make_entry(version=VERSION + 1))
    other = make_entry(replace(KEY, tokens=1), kernel="gpu_prefill")
    path = tmp_path / KIND / f"{KERNEL}.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), other]))
    (tmp_path / KIND / "unknown.json").write_text("[]")
    (tmp_path / "Abacus").mkdir()
    (tmp_path / "Abacus" / f"{KERNEL}.json").write_text("[]")
    sources = f'tune("{KERNEL}", formula, shape, rows)'
    found = "\n".join(list_dead_entries(tmp_path, sources))
    assert len(found.splitlines()) == 5
    for reason in ("entry 1 is never found", "entry 2 is of version", "entry 3 is of gpu_prefill", "Abacus", "unknown"):
        assert reason in found
    assert "never looks itself up" in "\n".join(list_dead_entries(tmp_path, "no code"))
