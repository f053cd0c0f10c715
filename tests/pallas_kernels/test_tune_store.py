"""Entries travel from the device in one file, and only those that a kernel takes are put into its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels.tune.store import Result, read_results, save_results, write_results
from pallas_kernels.tune.table import KERNELS, Entry, TuneKey, lookup, read_entries

KIND = "NVIDIA H200"
KEY = TuneKey(32, 8, 128, 64, "bfloat16", "bfloat16", window=False, tokens=32, max_len=4096)
FIGURES = {"us": 12.5, "formula_us": 13.0, "tried": 9, "jax": "0.12.0.1", "driver": "580", "date": "2026-11-21"}
DECODE = Entry("gpu_decode", KERNELS["gpu_decode"], KEY, {"stages": 4}, FIGURES | {"gb_per_s": 3000.0})
PREFILL = Entry("gpu_prefill", KERNELS["gpu_prefill"], KEY, {"registers": [240, 24]}, FIGURES | {"tflop_per_s": 400.0})
RESULTS = [Result(KIND, DECODE), Result(KIND, PREFILL), Result("TPU v6 lite", replace(DECODE, kernel="tpu_decode"))]


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    results = RESULTS[:2]
    for count in (0, 1, 2):
        write_results(path, results[:count])
        assert read_results(path) == results[:count]
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"], "nothing half written stays"


def test_results_go_to_the_tables_of_their_devices(tmp_path: Path) -> None:
    old = replace(DECODE, key=replace(KEY, tokens=1))
    save_results([Result(KIND, old), Result(KIND, replace(DECODE, config={"stages": 2}))], tmp_path)
    tables = save_results(RESULTS, tmp_path)
    assert tables == [
        tmp_path / KIND / "gpu_decode.json",
        tmp_path / KIND / "gpu_prefill.json",
        tmp_path / "TPU v6 lite" / "tpu_decode.json",
    ]
    read_entries.cache_clear()
    assert read_entries(tmp_path, KIND, "gpu_decode") == (old, DECODE), "in place of the one with its key"
    assert lookup("gpu_prefill", KIND, KEY, directory=tmp_path) == {"registers": [240, 24]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_kind": None}, "device_kind: missing"),
        ({"device_kind": "../H200"}, "cannot name a folder"),
        ({"kernel": "gpu_decod"}, "kernel: must be one of"),
        ({"version": 99}, "version: gpu_decode is at"),
        ({"config": {"stagse": 3}}, "config: gpu_decode does not take it: .*stagse"),
        ({"config": {"stages": 1}}, "config: gpu_decode does not take it: .*at least 2"),
        ({"measured": {}}, "measured: must have one of"),
    ],
)
def test_what_no_kernel_takes_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps([RESULTS[0].asdict(), RESULTS[0].asdict() | changes]))
    with pytest.raises(ValueError, match=rf"tuned\.json\[1\]\.{message}" if "folder" not in message else message):
        read_results(path)


@pytest.mark.parametrize(("text", "message"), [("[", "not JSON"), ("{}", "must be a list of entries, got dict")])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_results(path)
