"""Breaches of committed bounds are found, and say what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.test_bench_dry_runs import ROOT

pytestmark = pytest.mark.thorough


FILE = "scripts/bench_regression.toml"


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import regression_bounds

    return regression_bounds


@pytest.fixture
def regression(bounds: Any) -> Any:
    import bench_regression

    return bench_regression


def list_texts(bounds: Any, figures: dict[str, Any], committed: dict[str, Any], **left_out: str) -> list[str]:
    parsed = {name: bounds.Bound.parse(value) for name, value in committed.items()}
    return [each.text for each in bounds.find_breaches(figures, parsed, left_out, FILE)]


@pytest.mark.parametrize(
    ("found", "bound", "text"),
    [
        (10, 10, None),
        (0.5, {"least": 0.5}, None),
        (0.5, {"least": 0.1, "most": 0.5}, None),
        ("cpu", "cpu", None),
        (12, 10, "is 12, above its bound 10 by 2 (20.0% of it)"),
        (8, 10, "is 8, below its bound 10 by 2 (20.0% of it)"),
        (1, 0, "is 1, above its bound 0 by 1"),
        (0.3, {"least": 0.5}, "is 0.3, below its bound 0.5 by 0.2 (40.0% of it)"),
        (3.0, {"most": 2.0}, "is 3, above its bound 2 by 1 (50.0% of it)"),
        ("xla", "cpu", "is 'xla', and not 'cpu'"),
    ],
)
def test_a_breach_says_by_how_much(bounds: Any, found: Any, bound: Any, text: str | None) -> None:
    assert bounds.Bound.parse(bound).describe_breach(found) == text


def test_a_breach_says_what_to_write(bounds: Any) -> None:
    (text,) = list_texts(bounds, {"few_pages.steps.decode 8": 390}, {"few_pages.steps.decode 8": 383})
    assert text == (
        "few_pages.steps.decode 8 is 390, above its bound 383 by 7 (1.8% of it). If the change is meant, "
        f'write the new bound into {FILE}: [few_pages.steps] "decode 8" = 390'
    )


def test_figures_and_bounds_belong_together(bounds: Any) -> None:
    new, gone = list_texts(bounds, {"load.new": 3}, {"load.gone": 4})[::-1]
    assert "load.new has no bound" in new and new.endswith("[load] new = 3")
    assert (
        gone
        == f"load.gone has a bound and was not found. If the change is meant, take the bound out of {FILE}: [load] gone"
    )


def test_what_was_left_out_is_no_breach(bounds: Any) -> None:
    assert not list_texts(bounds, {}, {"attention": "cpu"}, attention="no compiler")


def test_times_only_warn(bounds: Any) -> None:
    limits = {"times.row": bounds.Bound.parse({"most": 1.0}), "load.steps": bounds.Bound.parse(1)}
    time, count = bounds.find_breaches({"times.row": 2.0, "load.steps": 2}, limits, {}, FILE)
    assert time.only_warns and not count.only_warns


@pytest.mark.parametrize(("value", "text"), [("[1, 2]", "a bound is a value or a table"), ("5 steps", "line 2")])
def test_a_wrong_file_is_one_clear_line(
    regression: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: str,
    text: str,
) -> None:
    file = tmp_path / "bounds.toml"
    file.write_text(f"[load]\nsteps = {value}\n")
    monkeypatch.setattr(sys, "argv", ["scripts/bench_regression.py", "--bounds", str(file)])
    with pytest.raises(SystemExit, match="2"):
        regression.main()
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_the_committed_bounds_can_be_read(regression: Any) -> None:
    committed = regression.read_bounds(regression.BOUNDS)
    assert {name.split(".")[0] for name in committed} >= {*regression.LOADS, "default_engine", "attention", "times"}
    assert all(committed[f"{load}.compiled"].most == 0 for load in regression.LOADS)


@pytest.mark.parametrize(
    ("name", "value", "status"), [("load.steps", 5, 0), ("load.steps", 6, 1), ("times.row", 2.0, 0)]
)
def test_only_counts_end_the_script(
    regression: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: float,
    status: int,
) -> None:
    file = tmp_path / "bounds.toml"
    file.write_text("[load]\nsteps = 5\n[times]\nrow = { most = 1.0 }\n")
    figures = {"load.steps": 5, "times.row": 0.5} | {name: value}
    monkeypatch.setattr(regression, "measure", lambda with_times: (figures, {}))
    monkeypatch.setattr(sys, "argv", ["scripts/bench_regression.py", "--bounds", str(file)])
    assert regression.main() == status
    captured = capsys.readouterr()
    assert "load.steps" in captured.out
    assert ("error: load.steps is 6" in captured.err) == (status == 1)
    assert ("warning: times.row is 2" in captured.err) == (name == "times.row")


def test_the_default_engine_s_programs_are_counted_without_compiling(regression: Any) -> None:
    committed = regression.read_bounds(regression.BOUNDS)
    for kind, count in regression.count_programs().items():
        assert committed[f"default_engine.{kind}"].most == count
