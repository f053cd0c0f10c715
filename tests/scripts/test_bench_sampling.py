"""The benchmark of sampling runs to its end and writes every figure that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bench_sampling_measures_every_feature(tmp_path: Path) -> None:
    file = tmp_path / "sampling.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_sampling.py", "--quick", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    points = json.loads(file.read_text())["points"]
    assert [(point["rows"], point["vocab_size"]) for point in points] == [(4, 1000)]
    for point in points:
        assert point["state_bytes_per_row"] > 4 * 1000
        assert {"step", "greedy", "top_k", "full: everything", "masked: everything"} < set(point["seconds"])
        for name, seconds in point["seconds"].items():
            assert seconds > 0 and name in done.stdout
