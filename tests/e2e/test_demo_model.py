"""The model that ships has its skills, through the engine: a mistake in caching or batching shows as lost accuracy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.presets import demo_model_dir
from tests.e2e.helpers import PROGRAMS

ROOT = Path(__file__).parents[2]


def test_it_is_small_and_complete() -> None:
    path = demo_model_dir()
    assert (path / "model.safetensors").stat().st_size <= 12e6
    config = json.loads((path / "config.json").read_text())
    assert (config["head_dim"], config["torch_dtype"]) == (64, "bfloat16")
    assert {"tokenizer.model", "tokenizer_config.json", "generation_config.json"} <= {p.name for p in path.iterdir()}


@pytest.mark.slow
@pytest.mark.thorough
def test_it_has_its_skills(tmp_path: Path) -> None:
    scores = tmp_path / "scores.json"
    command = [sys.executable, "scripts/eval_demo_model.py", "--json", str(scores)]
    command += ["--option", f"compilation_cache_dir={PROGRAMS}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert json.loads(scores.read_text())
