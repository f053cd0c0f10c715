"""Host memory while loading, against what the docstring of `load_safetensors` promises; in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.weights.measure_memory import write_checkpoint

SLACK = 32 * 2**20  # what allocators keep, and the runtime's threads
PAIRS = {"float32-float32": 2, "float32-bfloat16": 2, "bfloat16-float32": 2, "bfloat16-bfloat16": 2}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory by kind is read from /proc")
def test_peak_host_memory(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        write_checkpoint(tmp_path / dtype, dtype)
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.weights.measure_memory", str(tmp_path), *PAIRS],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    for dtype in ("float32", "bfloat16"):
        shutil.rmtree(tmp_path / dtype)  # pytest would keep hundreds of MB
    assert done.returncode == 0, done.stderr
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    for figures, (pair, copies) in zip(measured, PAIRS.items(), strict=True):
        assert figures["host"] <= copies * figures["largest"] + 2**20, (pair, figures)
    total, largest = measured[0]["total"], measured[0]["largest"]
    # On CPU the parameters are host memory, too; a loader that holds all tensors beside them takes twice `total`.
    assert total * 0.9 <= measured[0]["RssAnon"] <= total + 2 * largest + SLACK < 1.5 * total, measured[0]
    assert measured[0]["RssFile"] <= 3 * largest, measured[0]  # mapped pages are released as the load goes on
