"""The benchmark of the server runs to its end, counts every event, and writes what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.scripts.test_bench_dry_runs import run_script


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the CPU clocks of another process")
def test_bench_server(tmp_path: Path) -> None:
    output = run_script("bench_server.py", "--profile", "--json", str(tmp_path / "found.json"))
    for text in (
        "Server CPU per streamed chunk",
        "TTFT p99",
        "Serving tax",
        "event loop: microseconds",
        "cores of this",
    ):
        assert text in output, text
    found = json.loads((tmp_path / "found.json").read_text())
    assert [line["streams"] for line in found["streams"]] == [1, 8]
    for line in found["streams"]:
        assert line["ended"] == 0 and line["chunks"] > 0
        assert 0 < line["event_loop_us_per_chunk"] < line["cpu_us_per_chunk"]
        assert 0 < line["ttft"][0] <= line["ttft"][2] and 0 < line["itl"][0] <= line["itl"][2]
        assert line["profile"]["jaxserve-engine"]["seconds"] > 0
    assert found["tax"]["tax"] < 1 and found["tax"]["http_tokens_per_second"] > 0
