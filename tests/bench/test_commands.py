"""Every benchmark runs on the demo model, and its report is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxserve.bench.report import read_schema
from jaxserve.cli import main
from tests.programs import PROGRAMS

CACHE = ("--compilation-cache-dir", str(PROGRAMS))


def run(tmp_path: Path, name: str, *flags: str) -> dict[str, Any]:
    """Runs a benchmark and returns its report."""
    path = tmp_path / "report.json"
    assert main(["bench", name, "--dry-run", *CACHE, "--output-json", str(path), *flags]) == 0
    document = json.loads(path.read_text())
    jsonschema.validate(document, read_schema())
    assert document["benchmark"] == name and not document["failures"] and document["settings"]["dry_run"]
    return document


def check_spread(value: Any) -> None:
    jsonschema.validate(value, read_schema()["$defs"]["spread"])
    assert value["least"] <= value["median"] <= value["most"]


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(tmp_path, "throughput")["figures"]
    for name in ("elapsed_time", "requests_per_second", "tokens_per_second", "output_tokens_per_second", "limit_share"):
        check_spread(figures[name])
    assert figures["num_completed"] == 6 and figures["num_compiled"] == 0
    printed = capsys.readouterr().out
    assert "% of the limit of this device" in printed and "padding" in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("throughput", "--dataset-name", "imagenet"), "dataset_name: there is no dataset 'imagenet'"),
        (("throughput", "--dataset-name", "trace", "--dataset-path", "/none"), "/none cannot be read"),
        (("throughput", "--num-iters", "0"), "num_iters: must be at least 1, got 0"),
        (("throughput", "--output-json", "/none/x.json"), "output_json: /none is not a folder"),
    ],
)
def test_bad_input_is_one_line(flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags, *CACHE, "--compile", "used"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[-1] and lines[-1].startswith("jaxserve: ")


def test_bench_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "throughput" in capsys.readouterr().err
