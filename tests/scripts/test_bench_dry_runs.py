"""The instruments run to their end, and their reports are those of all benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxserve.tools.bench.report import read_schema
from tests.programs import PROGRAMS

pytestmark = pytest.mark.thorough


ROOT = Path(__file__).parents[2]


def run_script(name: str, *args: str, flag: str = "--dry-run") -> str:
    done = call_script(name, flag, *args)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def call_script(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "160", "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS)},
    )


def read_figures(folder: Path, name: str, *args: str, shown: str = "") -> dict[str, Any]:
    """Runs an instrument's dry run and returns the figures of its report, which is valid."""
    file = folder / "found.json"
    output = run_script(f"{name}.py", *args, "--output-json", str(file))
    assert shown in output
    document = json.loads(file.read_text())
    jsonschema.validate(document, read_schema())
    assert document["benchmark"] == name and document["settings"]["dry_run"] and not document["failures"]
    assert document["command"].startswith(f"python scripts/{name}.py --dry-run")
    figures: dict[str, Any] = document["figures"]
    return figures


def test_a_wrong_folder_is_found_before_the_run(tmp_path: Path) -> None:
    done = call_script("bench_structured.py", "--output-json", str(tmp_path / "missing" / "found.json"))
    assert done.returncode == 2 and "missing is not a folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "options", "shapes"),
    [("xla", (), 2), ("gpu_interpret", ("--only", "decode"), 1), ("tpu_interpret", (), 2)],
)
def test_bench_kernels(tmp_path: Path, impl: str, options: tuple[str, ...], shapes: int) -> None:
    figures = read_figures(tmp_path, "bench_kernels", "--impl", impl, *options)
    assert figures["impl"] == impl and len(figures["rows"]) == shapes
    for row in figures["rows"]:
        assert row["share"] > 0 and all(isinstance(seconds, float) for seconds in row["seconds"].values()), row


@pytest.mark.slow
@pytest.mark.thorough
def test_bench_structured(tmp_path: Path) -> None:
    figures = read_figures(tmp_path, "bench_structured", shown="structured, ms")
    (found,), (answers,) = figures["schema"], figures["answers"]
    assert answers["automata"]["tokens_per_answer"] >= 2 and answers["masks"]["ms_per_answer"] > 0
    assert found["structured"]["open_rows"] == 4 and found["structured"]["tokens_per_step"] > 3


@pytest.mark.slow
@pytest.mark.thorough
def test_bench_simulator(tmp_path: Path) -> None:
    figures = read_figures(tmp_path, "bench_simulator", "--clock=cpu", shown="simulated / real")
    assert figures["formula"]["step_seconds"] > 0
    assert all(min(pair) > 0 for quantiles in figures["milliseconds"].values() for pair in quantiles.values())


@pytest.mark.slow
@pytest.mark.thorough
def test_bench_multihost(tmp_path: Path) -> None:
    alone, beside = read_figures(tmp_path, "bench_multihost", shown="other nodes")["points"]
    assert (alone["followers"], beside["followers"]) == (0, 1) and alone["tell_us"] == 0 < beside["tell_us"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["loads", "programs"])
def test_bench_speculation(tmp_path: Path, kind: str) -> None:
    flags = ("--programs",) if kind == "programs" else ("--dtype", "float32")
    found = read_figures(tmp_path, "bench_speculation", *flags)[kind]
    assert all(each["ratio"] > 0 for each in found)
    assert len(found) == (10 if kind == "programs" else 1)
    assert kind == "programs" or found[0]["equal_answers"] == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_bench_lora(tmp_path: Path) -> None:
    (form,) = read_figures(tmp_path, "bench_lora", shown="bank / weights")["forms"]
    assert form["ratio"] > 0 and 0.2 < form["bank_share"] < 0.4


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "shown", "name"),
    [
        (("--loop",), "host time of a saved page", "paced_throughput_ratio"),
        ((), "loaded from the host", "load_bytes_per_second"),
    ],
)
def test_bench_kv_offload(tmp_path: Path, flags: tuple[str, ...], shown: str, name: str) -> None:
    assert read_figures(tmp_path, "bench_kv_offload", *flags, shown=shown)[name] > 0
