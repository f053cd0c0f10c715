"""Reports are valid, say what was run, and go where the flags say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jsonschema
import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.environment import describe_environment, read_cpu_model
from jaxserve.tools.bench.report import (
    Spread,
    add_report_flags,
    check_target,
    make_report,
    read_report_paths,
    read_schema,
)


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    parser.add_argument("--model")
    add_report_flags(parser)
    args = parser.parse_args(flags)
    args.argv = ["bench", "throughput", *flags]
    return args


def test_a_spread_has_a_median_and_one_run_is_no_figure() -> None:
    spread = Spread.of([1260, 1200, 1234])
    assert str(spread) == "1,234 (1,200 to 1,260)"
    assert spread.asdict() == {"median": 1234, "least": 1200, "most": 1260, "values": [1260, 1200, 1234]}
    assert Spread.of([0.5]).show(".1f", 1e3) == "500.0 (one run, no figure of its own)"


def test_a_report_is_valid_and_keeps_secrets() -> None:
    args = parse("--api-key", "hush", "--output-json", "x.json")
    figures = {"rate": Spread.of([1, 2]), "rows": [{"ms": Spread.of([3])}], "none": None}
    report = make_report(args, "host", describe_environment(), figures, failures=["one"], secret=["api_key"])
    document = json.loads(json.dumps(report.to_document()))
    jsonschema.validate(document, read_schema())
    assert document["figures"]["rows"][0]["ms"]["values"] == [3] and document["failures"] == ["one"]
    assert document["settings"] == {"api_key": "given", "save_result": False, "output_json": "x.json"}
    assert document["command"] == "jaxserve bench throughput --api-key ... --output-json x.json"
    args.argv = ["bench", "--api-key=hush"]
    assert "hush" not in json.dumps(make_report(args, "b", {}, {}, secret=["api_key"]).to_document())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"more": 1}, read_schema())
    with pytest.raises(jsonschema.ValidationError):  # the figures of our own benchmarks are described, too
        jsonschema.validate(document | {"benchmark": "throughput"}, read_schema())


def test_an_environment_without_devices_takes_none() -> None:
    found = describe_environment(has_devices=False)
    assert found["device"] is None and found["num_devices"] == 0 and found["jax"]
    assert describe_environment()["device"] == "cpu"


def test_the_name_of_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A Fast One\n\nprocessor\t: 1\nmodel name\t: A Fast One\n")
    assert read_cpu_model(path) == "A Fast One"
    assert read_cpu_model(tmp_path / "none")


def test_reports_go_where_the_flags_say(tmp_path: Path) -> None:
    assert read_report_paths(parse(), "latency") == []
    args = parse(
        "--save-result", "--result-dir", str(tmp_path), "--model", "org/model", "--output-json", str(tmp_path / "x")
    )
    saved, given = read_report_paths(args, "latency")
    assert saved.parent == tmp_path and saved.name.startswith("latency-org-model-") and saved.suffix == ".json"
    make_report(args, "latency", {}, {"a": 1}).save([saved, given])
    assert json.loads(saved.read_text()) == json.loads(given.read_text())
    named = parse("--save-result", "--result-dir", str(tmp_path), "--result-filename", "y.json")
    assert read_report_paths(named, "latency") == [tmp_path / "y.json"]


def test_bad_places_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^result_dir: .*folder"):
        read_report_paths(parse("--save-result", "--result-dir", str(tmp_path / "none")), "latency")
    with pytest.raises(ConfigError, match=r"^result_filename: .*--save-result"):
        read_report_paths(parse("--result-filename", "x.json"), "latency")
    with pytest.raises(ConfigError, match=r"^output_json: .*folder"):
        check_target(str(tmp_path), "output_json")
