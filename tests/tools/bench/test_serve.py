"""`bench serve` through the command line, against a tiny server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxserve.tools.bench.report import read_schema
from jaxserve.tools.cli import main
from tests.tools.bench.fake_server import FakeServer, Script, run_fake_server, stream

METRICS = """vllm:num_preemptions_total{model_name="fake"} %d
vllm:prefix_cache_queries_total{model_name="fake"} %d
vllm:prefix_cache_hits_total{model_name="fake"} %d
"""


def answer(body: dict[str, Any]) -> Script:
    is_chat = "messages" in body
    return stream(body["max_completion_tokens" if is_chat else "max_tokens"], chat=is_chat, delay=0.001)


TWO = ("--num-iters", "2")


class Counting:
    """/metrics that grow by each scrape."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, path: str) -> Script | None:
        if path != "/metrics":
            return None
        self.num += 1
        return Script(body=METRICS % (self.num, 100 * self.num, 25 * self.num))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with run_fake_server(answer, Counting()) as running:
        yield running


def run(server: FakeServer, tmp_path: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "report.json"
    arguments = ["bench", "serve", "--base-url", server.url, "--dry-run", "--output-json", str(path)]
    assert main([*arguments, "--num-processes", "1", "--num-warmups", "1", *flags]) == status
    document: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(document, read_schema())
    assert document["benchmark"] == "serve"
    return document


def test_one_load(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.bodies.clear()
    document = run(
        server, tmp_path, "--vocab-size", "99", "--api-key", "secret", "--goodput", "ttft:60000", "--num-iters", "2"
    )
    (point,) = document["figures"]["points"]
    for name in ("request_throughput", "output_throughput", "mean_ttft_ms", "p99_tpot_ms", "p90_itl_ms", "p50_e2el_ms"):
        jsonschema.validate(point[name], read_schema()["$defs"]["spread"])
        assert len(point[name]["values"]) == 2 and point[name]["median"] > 0
    assert point["completed"]["values"] == [6, 6] and point["failed"]["median"] == 0
    assert point["request_goodput"] == point["request_throughput"], "all are good"
    assert point["request_rate"] == "inf" and point["runs"][0]["server"] == {
        "preemptions": 1, "prefix_cache_queries": 100, "prefix_cache_hits": 25,
    }  # fmt: skip
    assert document["figures"]["model"] == "fake" and document["figures"]["max_model_len"] == 1024
    assert "secret" not in json.dumps(document) and document["environment"]["device"] is None
    bodies = server.bodies
    assert len(bodies) == 1 + 1 + 2 * 6, "a probe, a warm-up and two runs"
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in bodies)
    assert max(max(body["prompt"]) for body in bodies) < 99
    prompts = [tuple(body["prompt"]) for body in bodies[2:]]
    assert len(set(prompts)) == 12, "no run finds the prompts of one before in a cache"
    printed = capsys.readouterr().out
    for text in (
        "successful requests",
        "TTFT p99, ms",
        "of a core for 1,000 chunks/s",
        "2 preemptions",
        "25% of prompt",
    ):
        assert text in printed, text


def test_a_sweep_draws_its_curve(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot, page = tmp_path / "curve.svg", tmp_path / "page.html"
    flags = ("--vocab-size", "99", "--request-rate", "20", "40", "inf", "--num-iters", "1", "--max-concurrency", "4")
    document = run(server, tmp_path, *flags, "--plot", str(plot), "--html", str(page), "--percentile-metrics", "ttft")
    points = document["figures"]["points"]
    assert [point["request_rate"] for point in points] == [20, 40, "inf"]
    assert document["figures"]["saturation"]["request_throughput"] > 0
    assert all(point["max_concurrent_requests"]["median"] <= 4 for point in points)
    assert "TTFT p99" in plot.read_text() and "<svg" in page.read_text()
    printed = capsys.readouterr().out
    assert "20/s, at most 4" in printed and "TPOT" not in printed


def test_chat_sends_texts(server: FakeServer, tmp_path: Path) -> None:
    server.bodies.clear()
    run(server, tmp_path, "--backend", "openai-chat", "--dataset-name", "demo", "--extra-body", '{"top_p": 0.5}')
    body = server.bodies[-1]
    (message,) = body["messages"]
    assert message["role"] == "user" and isinstance(message["content"], str) and body["top_p"] == 0.5
    assert "ignore_eos" not in body, "answers of texts end where they end"
    server.bodies.clear()
    run(server, tmp_path, "--backend", "openai-chat", "--tokenizer", "demo")
    assert isinstance(server.bodies[-1]["messages"][0]["content"], str) and server.bodies[-1]["ignore_eos"]


def test_trace_arrivals(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--dataset-name", "azure-chat", "--vocab-size", "99", "--use-trace-arrivals", "--rate-scale", "1000")
    (point,) = run(server, tmp_path, *flags)["figures"]["points"]
    assert point["rate_scale"] == 1000 and point["completed"]["median"] == 6


def test_failures_are_counted_and_the_rest_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def sometimes(body: dict[str, Any]) -> Script:
        asked.append(1)
        kinds = {3: Script(429, {}), 4: Script(500, "broken"), 5: Script(events=answer(body).events[:2], cut=True)}
        return kinds.get(len(asked), answer(body))

    with run_fake_server(sometimes) as server:
        document = run(server, tmp_path, "--vocab-size", "99", "--num-iters", "1")
    (point,) = document["figures"]["points"]
    assert [point[name]["median"] for name in ("completed", "failed", "refused")] == [3, 2, 1]
    assert len(document["failures"]) == 2 and any("HTTP 500: broken" in line for line in document["failures"])
    assert "closed in the middle" in capsys.readouterr().err


def test_all_fail(tmp_path: Path) -> None:
    asked: list[int] = []

    def once(body: dict[str, Any]) -> Script:
        asked.append(1)
        return answer(body) if len(asked) < 3 else Script(503, {})

    with run_fake_server(once) as server:
        document = run(server, tmp_path, "--vocab-size", "99", status=1)
    assert document["figures"]["points"][0]["completed"]["median"] == 0
    assert document["figures"]["points"][0]["failed"]["median"] == 6


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(401, {"error": {"message": "who?"}}), "api_key: the first request to /v1/completions failed: HTTP 401"),
        (Script(404, "nothing here"), "endpoint: the first request to /v1/completions failed: HTTP 404: nothing here"),
        (
            Script(events=(b"data: [DONE]\n\n",)),
            "endpoint: the first request to /v1/completions failed: the answer has no",
        ),
    ],
)
def test_a_server_that_refuses(script: Script, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with run_fake_server(lambda body: script) as server:
        assert main(["bench", "serve", "--base-url", server.url, "--dry-run", "--vocab-size", "9"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"jaxserve: {words}")


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        (Script(401, {}), (), "api_key: the server refuses it (HTTP 401); give --api-key, or set OPENAI_API_KEY"),
        (Script(404, {}), (), "model: "),
        (
            Script(body={"data": [{"id": "a"}, {"id": "b"}]}),
            ("--model", "c"),
            "model: the server has no 'c'; it has a, b",
        ),
    ],
)
def test_models(script: Script, flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with run_fake_server(answer, lambda path: script) as server:
        assert main(["bench", "serve", "--base-url", server.url, "--vocab-size", "9", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "base_url: no server answers at http://127.0.0.1:1: "),
        (("--request-rate", "0"), "request_rate: must be above 0"),
        (("--rate-scale", "2"), "rate_scale: is for --use-trace-arrivals"),
        (("--use-trace-arrivals", "--request-rate", "2"), "request_rate: requests come when the trace's did"),
        (("--burstiness", "2"), "burstiness: must be above 0, and needs a finite --request-rate"),
        (("--goodput", "ttft=5"), "goodput: must be ttft:MS"),
        (("--metric-percentiles", "x"), "metric_percentiles: must be numbers"),
        (("--percentile-metrics", "tps"), "percentile_metrics: must be some of ttft,tpot,itl,e2el"),
        (("--max-concurrency", "0"), "max_concurrency: must be at least 1"),
        (("--base-url", "http://x", "--port", "1"), "port: --base-url says it already"),
        (("--dataset-name", "imagenet"), "dataset_name: there is no dataset 'imagenet'"),
        (("--plot", "curve.jpg"), "plot: must end in .png or .svg"),
    ],
)
def test_bad_input_is_one_line(flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = () if "--port" in flags else ("--port", "1")
    assert main(["bench", "serve", *port, *flags]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"jaxserve: {words}"), lines


def test_random_prompts_need_a_vocabulary(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", server.url]) == 2
    assert "tokenizer: random prompts need the model's tokenizer, or --vocab-size" in capsys.readouterr().err


def show_rows(path: str) -> Script | None:
    return Script(body='data: {"rows": {"max": 2, "running": []}}\n\n') if path == "/live" else None


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ((), 2),
        (("--request-rate", "inf"), 2),
        (("--request-rate", "1000"), None),
        (("--max-concurrency", "3"), 3),
    ],
)
def test_requests_at_once_are_as_many_as_the_server_has_rows(
    tmp_path: Path, flags: tuple[str, ...], limit: int | None
) -> None:
    with run_fake_server(answer, show_rows) as server:
        document = run(server, tmp_path, "--vocab-size", "99", *flags)
        assert limit is None or server.most_at_once <= limit
    (point,) = document["figures"]["points"]
    assert point["max_concurrency"] == limit and point["completed"]["median"] == 6


def test_a_server_that_does_not_tell_its_rows_gets_all_at_once(server: FakeServer, tmp_path: Path) -> None:
    (point,) = run(server, tmp_path, "--vocab-size", "99")["figures"]["points"]
    assert point["max_concurrency"] is None


def test_refusals_get_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def refuse_some(body: dict[str, Any]) -> Script:
        asked.append(1)
        return Script(429, {"error": {"message": "full"}}) if len(asked) in (4, 6) else answer(body)

    with run_fake_server(refuse_some) as server:
        document = run(server, tmp_path, "--vocab-size", "99")
    assert document["figures"]["points"][0]["refused"]["median"] == 2
    assert "The server refused 2 of 6 requests (429), whose times are not counted" in capsys.readouterr().out
