"""Starts take turns in processes of their own, and what they may not do is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench import startup
from jaxserve.bench.startup import Build, Start, StartError, list_faults, measure_starts, run_child, summarize_starts

pytestmark = pytest.mark.thorough


START = Start(2.0, 3.0, 2.5, 0, 4, (1, 2))


def test_starts_take_turns_and_cold_ones_get_new_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Mapping[str, Any]] = []

    def run(task: Mapping[str, Any]) -> dict[str, Any]:
        tasks.append(task["options"])
        return vars(START) | {"tokens": [1, 2]}

    monkeypatch.setattr(startup, "run_child", run)
    notes: list[int] = []
    found = measure_starts({"model": "demo"}, tuple(startup.KINDS), tmp_path, 2, lambda done, total: notes.append(done))
    caches = [Path(task["compilation_cache_dir"]).name for task in tasks]
    assert caches == ["cache-0", "cache-0", "unused", "cache-1", "cache-0", "unused"]
    assert [("bundle" in task) for task in tasks] == [False, False, True] * 2
    assert {kind: len(starts) for kind, starts in found.items()} == {"cold": 2, "warm": 2, "bundle": 2}
    assert found["cold"][0] == START and notes == [0, 1, 2, 3, 4, 5, 6]


def test_figures_and_faults() -> None:
    starts = {kind: [START, replace(START, seconds=4.0)] for kind in startup.KINDS}
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
    starts = {kind: [replace(START, num_compiled=5 * (kind == "bundle"))] for kind in startup.KINDS}
    assert list_faults(starts) and not list_faults(starts, makes_weights=True)


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(StartError, match="model: "):
        run_child({"options": {"model": "/none"}})
