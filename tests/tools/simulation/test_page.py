"""docs/simulation.md: its Python runs, and what it says of flags and formats is in the code."""

from __future__ import annotations

import re

import pytest

from jaxserve.tools.cli import _make_parser
from jaxserve.tools.simulation.traces import PACKAGED_TRACES
from tests.doc_pages import DOCS, run_blocks

pytestmark = pytest.mark.docs

PATH = DOCS / "simulation.md"


def test_blocks_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(PATH, monkeypatch)
    assert re.fullmatch(r"(\d+\.\d ms, then \d+\.\d ms a token\n){2}", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["simulate", "tune-buckets"])
def test_its_commands_are_understood(command: str) -> None:
    calls = re.findall(rf"^\$ jaxserve {command} ((?:.*\\\n)*.*)$", PATH.read_text(), flags=re.M)
    assert calls
    for call in calls:
        words = call.replace("\\\n", " ").partition(">")[0].split()
        trace = _make_parser().parse_args([command, *words]).trace
        assert trace in PACKAGED_TRACES, "an example needs no file from elsewhere"


def test_it_names_every_flag_of_its_own() -> None:
    args = _make_parser().parse_args(["simulate", "--trace", "x"])
    own = {"replicas", "router", "slo_ttft_ms", "slo_tpot_ms", "slo_share", "sweep", "json", "html", "trace", "device"}
    own |= {"calibration", "rate_scale", "max_requests"}
    assert own <= vars(args).keys()
    assert [name for name in own if f"--{name.replace('_', '-')}" not in PATH.read_text()] == []
