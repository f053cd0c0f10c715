"""Starts take turns in processes of their own, and what they may not do is named."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_startup
from bench_startup import Build, Start, StartError, list_faults, measure_starts, run_child, summarize_starts

from tests.scripts.test_bench_dry_runs import read_figures

pytestmark = pytest.mark.thorough


START = Start(2.0, 3.0, 2.5, 0, 4, (1, 2))


def test_starts_take_turns_and_cold_ones_get_new_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Mapping[str, Any]] = []

    def run(task: Mapping[str, Any]) -> dict[str, Any]:
        tasks.append(task["options"])
        return vars(START) | {"tokens": [1, 2]}

    monkeypatch.setattr(bench_startup, "run_child", run)
    notes: list[int] = []
    found = measure_starts(
        {"model": "demo"}, tuple(bench_startup.KINDS), tmp_path, 2, lambda done, total: notes.append(done)
    )
    caches = [Path(task["compilation_cache_dir"]).name for task in tasks]
    assert caches == ["cache-0", "cache-0", "unused", "cache-1", "cache-0", "unused"]
    assert [("bundle" in task) for task in tasks] == [False, False, True] * 2
    assert {kind: len(starts) for kind, starts in found.items()} == {"cold": 2, "warm": 2, "bundle": 2}
    assert found["cold"][0] == START and notes == [0, 1, 2, 3, 4, 5, 6]


def test_figures_and_faults() -> None:
    starts = {kind: [START, replace(START, seconds=4.0)] for kind in bench_startup.KINDS}
    figures = summarize_starts(starts, Build(9.0, 100))
    assert figures["starts"]["cold"]["seconds"].median == 3.0 and figures["build_seconds"] == 9.0
    assert "build_seconds" not in summarize_starts({"cold": [START]}, None) and not list_faults({"cold": [START]})
    assert list_faults(starts) == []
    starts["warm"] = [replace(START, num_compiled=3)]
    starts["bundle"] = [replace(START, tokens=(1, 3))]
    assert list_faults(starts) == [
        "the starts do not give the same tokens",
        "a start with a full compile cache compiled 3 programs",
    ]


def test_random_weights_may_be_compiled() -> None:
    starts = {kind: [replace(START, num_compiled=5 * (kind == "bundle"))] for kind in bench_startup.KINDS}
    assert list_faults(starts) and not list_faults(starts, makes_weights=True)


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(StartError, match="model: "):
        run_child({"options": {"model": "/none"}})


def test_what_decides_the_kind_of_a_start_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_startup.py", "--bundle", "x"])
    with pytest.raises(SystemExit, match="2"):
        bench_startup.main()
    assert "bundle: each start gets one of its own; leave it out" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_cold_and_warm_starts(tmp_path: Path) -> None:
    starts = read_figures(tmp_path, "bench_startup", shown="one run, no figure of its own")["starts"]
    counts = [(found["num_compiled"] > 0, found["num_cached"] > 0) for found in starts.values()]
    assert list(starts) == ["cold", "warm"] and counts == [(True, False), (False, True)]


@pytest.mark.slow
def test_starts_from_a_bundle(tmp_path: Path) -> None:
    figures = read_figures(tmp_path, "bench_startup", "--starts", "bundle", shown="The bundle took")
    found = figures["starts"]["bundle"]
    assert (found["num_compiled"], found["num_cached"]) == (0, 0)
    assert figures["bundle_bytes"] > 0 and figures["build_seconds"] > 0
