"""The host benchmark runs to its end and writes what the page of figures needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.test_bench_dry_runs import read_figures

pytestmark = pytest.mark.thorough


def test_bench_host_writes_its_parts(tmp_path: Path) -> None:
    points = read_figures(tmp_path, "bench_host", "--record", shown="Host time per step")["points"]
    assert [point["rows"] for point in points] == [1, 16]
    for point in points:
        parts = [point[f"{part}_us"] for part in ("plan", "inputs", "dispatch", "commit", "tell", "detokenize")]
        assert all(part > 0 for part in parts)
        assert abs(sum(parts) - point["total_us"]) < 1e-6 * point["total_us"]
