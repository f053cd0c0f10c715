"""The load generator sends on time, waits for nobody, and notes what became of each request."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.load.client import Client
from jaxserve.tools.bench.load.generator import LoadGenerator
from jaxserve.tools.bench.load.records import LoadOutcome, RequestRecord
from jaxserve.tools.bench.load.schedule import draw_arrivals, scale_arrivals
from jaxserve.tools.bench.load.target import Target
from tests.tools.bench.fake_server import DONE, FakeServer, Script, run_fake_server, stream

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def generator() -> Iterator[LoadGenerator]:
    with LoadGenerator(2) as made:
        yield made


def answer(body: dict[str, Any]) -> Script:
    """Does what the prompt says."""
    kind = body["prompt"]
    return {
        "plain": stream(4),
        "slow": stream(3, delay=0.1),
        "together": replace(stream(1), at_once=10),
        "no usage": stream(4, usage=False),
        "cached": stream(2, cached=5),
        "429": Script(429, {"error": {"message": "full"}}),
        "500": Script(500, {"error": {"message": "broken"}}),
        "cut": Script(events=stream(4).events[:2], cut=True),
        "no end": Script(events=stream(4).events[:2]),
        "error": Script(
            events=({"choices": [{"text": "a"}]}, {"error": {"message": "out of luck"}}, b"data: [DONE]\n\n")
        ),
        "nonsense": Script(events=(b"data: {\n\n", DONE)),
        "empty": Script(events=(DONE,)),
        "hangs": stream(2, delay=60),
        "closes": Script(events=stream(2).events, keeps_alive=False),
    }[kind]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with run_fake_server(answer) as running:
        yield running


def run(
    generator: LoadGenerator, server: FakeServer, *kinds: str, arrivals: list[float] | None = None, **how
) -> LoadOutcome:
    target = Target.parse(server.url, "/v1/completions")
    requests = [target.encode({"prompt": kind}) for kind in kinds]
    return generator.run(target, requests, arrivals or [0.0] * len(kinds), **how)


def test_records_are_in_order_and_count_tokens_and_gaps(generator: LoadGenerator, server: FakeServer) -> None:
    records = run(generator, server, "plain", "slow", "no usage", "cached", "plain").records
    assert [record.num_tokens for record in records] == [4, 3, 4, 2, 4]
    assert [record.num_output_tokens for record in records] == [4, 3, None, 2, 4]
    assert records[3].num_cached_tokens == 5 and records[0].num_prompt_tokens == 7
    slow = records[1]
    # The server waits in front of each chunk; a client that comes to read late may find two of them at once.
    assert all(time - slow.sent >= 0.09 * at for at, time in enumerate(slow.chunk_times, 1))
    assert slow.itls == [after - before for before, after in pairwise(slow.chunk_times)] and len(slow.itls) == 2
    assert slow.tpot is not None and slow.tpot == pytest.approx((slow.e2el - slow.ttft) / 2)
    assert all(record.is_complete and record.finish_reason == "length" for record in records)


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("429", 429, "HTTP 429: "),
        ("500", 500, "broken"),
        ("cut", 200, "closed in the middle"),
        ("no end", 200, "before its end of stream"),
        ("error", 200, "out of luck"),
        ("nonsense", 200, "not OpenAI's"),
        ("empty", 200, "no output"),
    ],
)
def test_what_fails_is_noted_and_the_rest_goes_on(
    generator: LoadGenerator, server: FakeServer, kind: str, status: int, words: str
) -> None:
    good, bad = run(generator, server, "plain", kind).records
    assert good.is_complete and not bad.is_complete
    assert bad.status == status and words in str(bad.error) and bad.is_refused == (kind == "429")
    assert bad.end >= bad.sent > 0


def test_a_request_that_hangs_is_given_up(generator: LoadGenerator, server: FakeServer) -> None:
    (record,) = run(generator, server, "hangs", timeout=0.3).records
    assert record.error == "no end within 0.3 s"
    (after,) = run(generator, server, "plain").records
    assert after.is_complete


def test_nobody_answers(generator: LoadGenerator) -> None:
    target = Target("127.0.0.1", 1, "/v1/completions")
    (record,) = generator.run(target, [target.encode({})], [0.0]).records
    assert record.status == 0 and "refused" in str(record.error).lower()


def test_connections_are_used_again_and_a_closed_one_is_replaced(server: FakeServer) -> None:
    target = Target.parse(server.url, "/v1/completions")

    async def ask(*kinds: str) -> list[RequestRecord]:
        client, records = Client(target), [RequestRecord() for _ in kinds]
        for kind, record in zip(kinds, records, strict=True):
            await client.send(target.encode({"prompt": kind}), record)
        client.close()
        return records

    before = server.num_connections
    assert all(record.is_complete for record in asyncio.run(ask(*["plain"] * 5)))
    assert server.num_connections == before + 1
    assert all(record.is_complete for record in asyncio.run(ask("closes", "plain", "plain")))
    assert server.num_connections == before + 3


def test_arrivals_do_not_wait_for_a_slow_server(generator: LoadGenerator) -> None:
    arrivals = [0.05 * at for at in range(10)]
    with run_fake_server(answer) as server:  # answers nobody before all have come
        outcome = run(generator, server, *["together"] * 10, arrivals=arrivals)
        assert server.most_at_once == 10
    start = outcome.start
    for record, arrival in zip(outcome.records, arrivals, strict=True):
        assert record.scheduled == pytest.approx(start + arrival)
        assert record.is_complete and record.scheduled <= record.sent
    assert max(record.sent for record in outcome.records) < min(record.end for record in outcome.records)
    assert outcome.seconds == pytest.approx(max(record.end for record in outcome.records) - start)


def test_the_limit_of_concurrency_holds_over_all_processes(generator: LoadGenerator) -> None:
    with run_fake_server(answer) as server:
        outcome = run(generator, server, *["slow"] * 9, max_concurrency=3)
        assert server.most_at_once == 3
    assert all(record.is_complete for record in outcome.records)
    assert all(record.due >= record.scheduled for record in outcome.records)


def test_the_client_counts_its_own_time(generator: LoadGenerator, server: FakeServer) -> None:
    outcome = run(generator, server, *["plain"] * 20)
    assert outcome.num_chunks == 80 and len(outcome.worker_cores) == 2
    assert outcome.cpu_seconds > 0 and all(cores > 0 for cores in outcome.worker_cores)


def test_text_is_kept_where_it_is_asked_for(generator: LoadGenerator, server: FakeServer) -> None:
    (record,) = run(generator, server, "plain", keeps_text=True).records
    assert record.text == "w0 w1 w2 w3 "
    assert run(generator, server, "plain").records[0].text == ""


def test_requests_that_have_ended_are_told(generator: LoadGenerator, server: FakeServer) -> None:
    told: list[int] = []
    for _ in range(2):  # a run counts from 0, whatever ran before
        run(generator, server, *["slow"] * 9, "429", progress=told.append)
    assert told[-1] == 10 and told.count(10) >= 2 and min(told) >= 0 and max(told) == 10


def test_events_may_be_cut_anywhere() -> None:
    """By the network, into pieces of one byte."""
    from jaxserve.tools.bench.load.answers import AnswerReader

    record = RequestRecord(status=200)
    reader, text = AnswerReader(record, keeps_text=True), b""
    for event in stream(3).events:
        text += event if isinstance(event, bytes) else b"data: " + repr(event).replace("'", '"').encode() + b"\r\n\r\n"
    for at in range(len(text)):
        reader.feed(text[at : at + 1], float(at))
    reader.finish(9999.0)
    assert record.error is None and record.text == "w0 w1 w2 " and record.num_output_tokens == 3
    assert list(record.chunk_times) == sorted(record.chunk_times)


def test_a_role_and_an_end_are_no_output() -> None:
    from jaxserve.tools.bench.load.answers import AnswerReader

    record = RequestRecord(status=200)
    reader = AnswerReader(record)
    reader.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', 1.0)
    reader.feed(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n', 2.0)
    reader.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n', 3.0)
    reader.finish(4.0)
    assert list(record.chunk_times) == [2.0] and record.finish_reason == "stop" and record.end == 4.0


def test_poisson_arrivals() -> None:
    times = draw_arrivals(20_000, 50.0, seed=3)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times) and draw_arrivals(20_000, 50.0, seed=3) == times
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05), "of an exponential distribution: its mean"
    per_second = [sum(second <= time < second + 1 for time in times) for second in range(100)]
    assert statistics.variance(per_second) == pytest.approx(50, rel=0.5)


def test_burstiness_keeps_the_rate() -> None:
    for burstiness, cv in ((0.25, 2.0), (4.0, 0.5)):
        times = draw_arrivals(20_000, 10.0, burstiness=burstiness, seed=1)
        gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.05)


def test_an_infinite_rate_and_a_scaled_trace() -> None:
    assert draw_arrivals(3, float("inf")) == [0.0, 0.0, 0.0]
    assert scale_arrivals([5.0, 7.0, 11.0], 2.0) == [0.0, 1.0, 3.0]
    with pytest.raises(ConfigError, match="no arrival times"):
        scale_arrivals([0.0, 0.0], 1.0)


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "/v1/completions"),
        ("https://api.example/base/", "api.example", 443, "/base/v1/completions"),
        ("localhost:1", "localhost", 1, "/v1/completions"),
        ("http://[::1]:9", "::1", 9, "/v1/completions"),
    ],
)
def test_urls(url: str, host: str, port: int, path: str) -> None:
    target = Target.parse(url, "/v1/completions")
    assert (target.host, target.port, target.path, target.is_tls) == (host, port, path, url.startswith("https"))


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:port"])
def test_bad_urls_are_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^base_url: "):
        Target.parse(url, "/v1")


def test_a_dead_worker_is_no_hang(server: FakeServer) -> None:
    from jaxserve.errors import ClusterError

    with LoadGenerator(1) as made:
        process, _ = made._workers[0]
        process.kill()
        process.join(10)
        with pytest.raises(ClusterError, match="ended in the middle"):
            run(made, server, "plain")


def test_a_connection_that_was_closed_while_idle_costs_no_request() -> None:
    """The server closes it after an answer that promised to keep it."""
    asked: list[int] = []

    def once(body: dict[str, Any]) -> Script:
        asked.append(1)
        return stream(2) if len(asked) != 2 else Script(cut=True, status=0)

    async def ask(target: Target) -> list[RequestRecord]:
        client, records = Client(target), [RequestRecord() for _ in range(3)]
        for record in records:
            await client.send(target.encode({"prompt": "plain"}), record)
        client.close()
        return records

    with run_fake_server(once) as short:
        records = asyncio.run(ask(Target.parse(short.url, "/v1/completions")))
    assert [record.error for record in records] == [None, None, None] and len(asked) == 4


def test_workers_of_the_load_generator_load_nothing_heavy() -> None:
    code = "import sys, jaxserve.tools.bench.load.worker; print(*{'jax', 'numpy', 'rich', 'httpx'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
