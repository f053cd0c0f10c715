"""The benchmark of the host tier runs to its end, with and without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--loop", "--prompts", "4", "--repeats", "1"], ["throughput", "host time of a saved page"]),
        (["--prompt", "200", "--size", "0.02", "--repeats", "1"], ["device to host", "GB/s", "loaded from the host"]),
    ],
)
def test_it_shows_its_figures(arguments: list[str], shown: list[str]) -> None:
    command = [sys.executable, "-m", "scripts.bench_kv_offload", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in shown)
