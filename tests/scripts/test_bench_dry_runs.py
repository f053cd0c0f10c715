"""The instruments for accelerators run to their end on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_script(name: str, *args: str, flag: str = "--dry-run") -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / name, flag, *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "options", "shapes"),
    [("xla", (), 2), ("gpu_interpret", ("--only", "decode"), 1), ("tpu_interpret", (), 2)],
)
def test_bench_kernels(tmp_path: Path, impl: str, options: tuple[str, ...], shapes: int) -> None:
    run_script("bench_kernels.py", "--impl", impl, *options, "--json", str(tmp_path / "found.json"))
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["impl"] == impl and len(document["rows"]) == shapes
    for row in document["rows"]:
        assert row["share"] > 0 and all(isinstance(seconds, float) for seconds in row["seconds"].values()), row


@pytest.mark.slow
@pytest.mark.thorough
def test_bench_structured(tmp_path: Path) -> None:
    output = run_script("bench_structured.py", "--json", str(tmp_path / "found.json"), flag="--quick")
    assert "structured, ms" in output
    written = json.loads((tmp_path / "found.json").read_text())
    (found,), (answers,) = written["schema"], written["answers"]
    assert answers["automata"]["tokens_per_answer"] >= 2 and answers["masks"]["ms_per_answer"] > 0
    assert found["structured"]["open_rows"] == 4 and found["structured"]["tokens_per_step"] > 3


@pytest.mark.slow
@pytest.mark.thorough
def test_bench_simulator(tmp_path: Path) -> None:
    sizes = "--rows", "8", "--budget", "256", "--requests", "60", "--repeats", "1"
    output = run_script("bench_simulator.py", *sizes, "--json", str(tmp_path / "found.json"), flag="--clock=cpu")
    assert "simulated / real" in output
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["formula"]["step_seconds"] > 0
    assert all(min(pair) > 0 for quantiles in document["milliseconds"].values() for pair in quantiles.values())
