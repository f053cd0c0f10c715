"""`jaxserve bench serve` against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from jaxserve.tools.bench.report import read_schema
from jaxserve.tools.cli import main
from tests.server.running import RunningServer


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_figures_of_a_real_server(server: RunningServer, tmp_path: Path, backend: str) -> None:
    path = tmp_path / "report.json"
    flags = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5", "--num-warmups", "1"]
    flags += ["--request-rate", "50", "--num-processes", "1", "--backend", backend, "--output-json", str(path)]
    assert main(["bench", "serve", "--base-url", server.url, *flags]) == 0
    document = json.loads(path.read_text())
    jsonschema.validate(document, read_schema())
    (point,) = document["figures"]["points"]
    (run,) = point["runs"]
    assert run["completed"] == 6 and run["failed"] == run["refused"] == 0 and not document["failures"]
    assert run["total_output_tokens"] == 30 and run["tokens_counted_by"] == "usage"
    assert run["finish_reasons"] == {"length": 6}
    if backend == "openai":
        assert run["total_input_tokens"] == 120, "token ids arrive as they were sent"
    assert run["server"]["generation_tokens"] == 30 and run["server"]["preemptions"] == 0
    assert 0 < run["median_ttft_ms"] <= run["median_e2el_ms"] and run["median_tpot_ms"] > 0
