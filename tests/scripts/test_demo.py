"""The demo runs to its table, and its plot shows what its three ways did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from batching import Served
from demo import WAYS, plot

ROOT = Path(__file__).parents[2]


def test_the_plot_has_every_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ends = ((4.0, 1.0, 2.5), (3.0, 3.0, 3.0), (0.5, 1.0, 0.7))
    results = [Served(way, max(each), 90, 90, each, each) for way, each in zip(WAYS, ends, strict=True)]
    plot(results, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "one at a time: all after 4.0 s" in text and "continuous batching: all after 1.0 s" in text


def test_demo_shows_answers_and_one_table() -> None:
    command = [sys.executable, "scripts/demo.py", "--num-prompts", "12", "--num-requests", "6"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    three_ways = "one at a time", "static batches of 32", "continuous"
    for text in ("nothing is compiled from here on", "18 of 18", "= 47", "Ahoy!", *three_ways):
        assert text in done.stdout, text
    assert done.stdout.count("\n> ") >= 6, "some answers of each skill"
