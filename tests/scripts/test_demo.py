"""The demo runs to its table, and its three ways serve the same load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_demo_shows_answers_and_one_table() -> None:
    command = [sys.executable, "scripts/demo.py", "--num-prompts", "12", "--num-requests", "6"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for text in ("nothing is compiled from here on", "12 of 12", "one at a time", "static batches of 32", "continuous"):
        assert text in done.stdout, text
    assert done.stdout.count("\n> ") >= 6, "some answers of each skill"
