"""The peers that ask a server, against servers that compute nothing; and what the protocol trims."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from comparison import Comparison, Outcome, Participant, compare
from peers import protocol

from jaxserve.tools.bench.datasets import BenchRequest
from tests.tools.bench.fake_server import Script, run_fake_server

pytestmark = pytest.mark.thorough


REQUESTS = [BenchRequest((7,) * length, None, length, output) for length, output in ((3, 4), (5, 2))]
LLAMA_SERVER = """#!%s
import http.server, json, sys

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert flags["-m"] == "model.gguf" and flags["-np"] == "2" and flags["-c"] == "256"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["temperature"] == 0 and body["ignore_eos"] and not body["cache_prompt"]
        self.answer({"tokens": [len(body["prompt"])] * body["n_predict"], "tokens_predicted": body["n_predict"]})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def run(peer: str) -> Outcome:
    comparison = Comparison("/model", REQUESTS, "float32", 2, 1, True, num_iters=1, timeout=60.0)
    (outcome,) = compare(comparison, [Participant.parse_peer(peer)])
    return outcome


@pytest.mark.parametrize("has_ids", [True, False])
def test_any_openai_server(has_ids: bool) -> None:
    def answer(body: dict[str, Any]) -> Script:
        assert body["prompt"][0] == 7 and body["ignore_eos"] and body["temperature"] == 0
        ids = {"token_ids": [9] * body["max_tokens"]} if has_ids else {}
        return Script(body={"choices": [{"text": "a", **ids}], "usage": {"completion_tokens": body["max_tokens"]}})

    with run_fake_server(answer) as server:
        outcome = run(f"openai: base_url={server.url}")
    assert outcome.skipped is None and outcome.outputs == [[[9] * 4, [9] * 2] if has_ids else [4, 2]]
    assert outcome.num_tokens == 6 and "fake at http" in outcome.facts["library"]


def test_a_server_that_is_not_there() -> None:
    assert "refused" in str(run("openai: base_url=http://127.0.0.1:1").skipped)


def test_llama_cpp(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(LLAMA_SERVER % sys.executable)
    program.chmod(0o755)
    outcome = run(f"llama_cpp: gguf=model.gguf, server={program}")
    assert outcome.skipped is None and outcome.outputs == [[[3] * 4, [5] * 2]]
    assert "needs the model as a GGUF file" in str(run(f"llama_cpp: server={program}").skipped)
    assert "not installed: /none is not on the PATH" in str(run("llama_cpp: server=/none").skipped)


def test_answers_end_at_their_length_or_their_end(tmp_path: Path) -> None:
    request = {"max_tokens": 3}
    assert protocol.trim([1, 2, 3, 4], request, []) == [1, 2, 3]
    assert protocol.trim([1, 2, 3, 4], request, [2]) == [1, 2]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    job = {"model": str(tmp_path), "ignore_eos": False}
    assert protocol.read_eos_ids(job) == [5] and protocol.read_eos_ids(job | {"ignore_eos": True}) == []
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert protocol.read_eos_ids(job) == [6, 7]
