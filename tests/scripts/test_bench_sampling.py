"""The benchmark of sampling runs to its end and writes every figure that it prints."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts.test_bench_dry_runs import run_script


def test_bench_sampling_measures_every_feature(tmp_path: Path) -> None:
    file = tmp_path / "sampling.json"
    shown = run_script("bench_sampling.py", "--json", str(file), flag="--quick")
    points = json.loads(file.read_text())["points"]
    assert [(point["rows"], point["vocab_size"]) for point in points] == [(4, 1000)]
    for point in points:
        assert point["state_bytes_per_row"] > 4 * 1000
        assert {"step", "greedy", "top_k", "full: everything", "masked: everything"} < set(point["seconds"])
        for name, seconds in point["seconds"].items():
            assert seconds > 0 and name in shown
