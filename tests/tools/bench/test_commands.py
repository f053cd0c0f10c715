"""Every benchmark runs on the demo model, and its report is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxserve.tools.bench.report import read_schema
from jaxserve.tools.cli import main
from jaxserve.tools.simulation.calibration import read_calibration
from tests.programs import PROGRAMS

pytestmark = pytest.mark.thorough


CACHE = ("--compilation-cache-dir", str(PROGRAMS))


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def read(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    jsonschema.validate(document, read_schema())
    return document


def run(tmp_path: Path, name: str, *flags: str) -> dict[str, Any]:
    """Runs a benchmark and returns its report."""
    path = tmp_path / "report.json"
    assert main(["bench", name, "--dry-run", *CACHE, "--output-json", str(path), *flags]) == 0
    document = read(path)
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


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(tmp_path, "latency")["figures"]
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"] and len(figures["latencies"]) == 3
    assert figures["percentiles"]["10"] <= figures["avg_latency"] <= figures["percentiles"]["99"]
    check_spread(figures["limit_share"])
    assert "% of the limit of this device" in capsys.readouterr().out


def test_sweep_of_batch_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    calibration = tmp_path / "calibration.json"
    pictures = "--plot", str(tmp_path / "x.svg"), "--html", str(tmp_path / "x.html")
    figures = run(tmp_path, "sweep", "--calibrate", str(calibration), *pictures)["figures"]
    points = figures["points"]
    assert [(point["batch_size"], point["context"]) for point in points] == [
        (batch, context) for context in (32, 48) for batch in (1, 2, 4)
    ]
    for point in points:
        for name in ("step_seconds", "tokens_per_second", "tokens_per_second_per_user", "limit_share"):
            check_spread(point[name])
    assert [end["context"] for end in figures["ends"]] == [32, 48] and not figures["not_measured"]
    found = read_calibration(calibration)
    assert found.is_measured and found.platform == "cpu" and found.bytes_per_second > 0
    steps = json.loads(calibration.read_text())["steps"]
    assert [step["rows"] for step in steps] == [2, 2, 4, 2, 2, 4, 4], "padding included"
    assert steps[-1]["operations"] > 10 * steps[0]["operations"]
    assert "% of limit" in capsys.readouterr().out
    assert "Decoding by batch size" in (tmp_path / "x.svg").read_text()
    assert (tmp_path / "x.html").read_text().count("<svg") == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("throughput", "--dataset-name", "imagenet"), "dataset_name: there is no dataset 'imagenet'"),
        (("throughput", "--dataset-name", "trace", "--dataset-path", "/none"), "/none cannot be read"),
        (("throughput", "--num-iters", "0"), "num_iters: must be at least 1, got 0"),
        (("throughput", "--output-json", "/none/x.json"), "output_json: /none is not a folder"),
        (("sweep", "--html", "/none/x.html"), "html: /none is not a folder"),
    ],
)
def test_bad_input_is_one_line(flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags, *CACHE, "--compile", "used"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[-1] and lines[-1].startswith("jaxserve: ")


def test_bench_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "throughput" in capsys.readouterr().err
