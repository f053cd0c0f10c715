"""The host benchmark runs to its end and writes what the README of figures needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bench_host_writes_its_parts(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    command = [
        sys.executable,
        "scripts/bench_host.py",
        "--rows",
        "1",
        "16",
        "--steps",
        "20",
        "--record",
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert [figure["rows"] for figure in figures] == [1, 16]
    for figure in figures:
        parts = [figure[f"{part}_us"] for part in ("plan", "inputs", "dispatch", "commit", "tell", "detokenize")]
        assert all(part > 0 for part in parts)
        assert abs(sum(parts) - figure["total_us"]) < 1e-6 * figure["total_us"]
