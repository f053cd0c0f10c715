"""Tiers and tenants from a body to the engine and back, in process, over the fake device."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from jaxserve.request import Request, ServiceTier, Tenant
from jaxserve.server.app import make_app
from jaxserve.server.keys import KeyRights, hash_key
from jaxserve.server.live import take_picture
from jaxserve.server.options import ServerConfig
from tests.server.test_live import Served, run, serve

CHAT, CRAWLER, PLAIN = "key-of-chat-1", "key-of-crawler-2", "key-of-nobody-3"
PRIORITY, DEFAULT, FLEX = ServiceTier
KEYS = {
    hash_key(CHAT): KeyRights(Tenant("chat", weight=4), -5, (PRIORITY, DEFAULT)),
    hash_key(CRAWLER): KeyRights(Tenant("crawler", queue_share=0.25), 3, (FLEX,)),
    hash_key(PLAIN): KeyRights(),
}
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}


@asynccontextmanager
async def connect(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(served.state, KEYS))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


async def complete(client: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=PROMPT | fields, headers={"authorization": f"Bearer {key}"})


def note_requests(served: Served) -> list[Request]:
    """The requests that the engine takes from now on."""
    seen: list[Request] = []
    add = served.engine.add_request

    def note(request: Request) -> None:
        seen.append(request)
        add(request)

    served.engine.add_request = note  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("key", "fields", "tier", "priority"),
    [
        (CHAT, {}, DEFAULT, 0),
        (CHAT, {"service_tier": "auto"}, DEFAULT, 0),
        (CHAT, {"service_tier": "priority", "priority": -5}, PRIORITY, -5),
        (CRAWLER, {}, FLEX, 3),
        (CRAWLER, {"service_tier": "auto", "priority": 7, "user": "someone"}, FLEX, 7),
        (PLAIN, {"service_tier": "flex"}, FLEX, 0),
    ],
)
def test_the_engine_gets_tier_priority_and_tenant_and_the_answer_names_the_tier(
    key: str, fields: dict[str, Any], tier: ServiceTier, priority: int
) -> None:
    with serve() as served:
        seen = note_requests(served)

        async def test() -> None:
            async with connect(served) as client:
                whole = await complete(client, key, **fields)
                stream = await complete(client, key, **fields, stream=True, stream_options={"include_usage": True})
                answers = [whole.json()]
                answers += [json.loads(line[6:]) for line in stream.text.split("\n\n")[:-2]]
                assert len(answers) == 3  # the answer, and two chunks: the end, as there is no text, and the usage
                for answer in answers:
                    assert answer.get("service_tier") == (str(tier) if "service_tier" in fields else None)

        run(test)
        for request in seen:
            assert (request.service_tier, request.priority) == (tier, priority)
            assert request.tenant == KEYS[hash_key(key)].tenant
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("key", "fields", "status", "param", "code", "words"),
    [
        (CHAT, {"service_tier": "flex"}, 403, "service_tier", "service_tier_not_allowed", "priority, default"),
        (CRAWLER, {"service_tier": "default"}, 403, "service_tier", "service_tier_not_allowed", "may use flex"),
        (CHAT, {"priority": -6}, 403, "priority", "priority_not_allowed", "-5 is its best"),
        (CRAWLER, {"priority": 2}, 403, "priority", "priority_not_allowed", "3 is its best"),
        (PLAIN, {"priority": -1}, 400, "priority", "invalid_value", "at least 0 on this server"),
        *(
            (PLAIN, {"service_tier": tier}, 400, "service_tier", "invalid_value", "'auto', 'default', 'flex' or 'pri")
            for tier in ("fast", "scale", "", "Flex", 1)
        ),
    ],
)
def test_what_a_key_may_not_have_is_refused_by_name(
    key: str, fields: dict[str, Any], status: int, param: str, code: str, words: str
) -> None:
    with serve() as served:
        seen = note_requests(served)

        async def test() -> None:
            async with connect(served) as client:
                for stream in (False, True):
                    answer = await complete(client, key, **fields, stream=stream)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
                    assert error["type"] == "invalid_request_error" and words in error["message"]

        run(test)
        assert not seen


class Steps:
    """A gate of `Served` that lets single steps pass."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)

    def wait(self, seconds: float) -> None:
        self._steps.acquire(timeout=seconds)

    def let(self, count: int = 1) -> None:
        self._steps.release(count)

    def set(self) -> None:
        self.let(10_000)


async def wait_for_jobs(served: Served, count: int) -> None:
    """Waits until the engine, which is in a step, has so many jobs to do after it."""
    while served.thread._jobs.qsize() < count:
        await asyncio.sleep(0.001)


def test_a_tenant_with_a_full_share_gets_429_and_others_are_served() -> None:
    with serve(rows=1, queue=(4, None)) as served:

        async def test() -> None:
            async with connect(served) as client:
                served.gate.clear()
                running = [asyncio.ensure_future(complete(client, CHAT))]
                while not served.engine.has_unfinished:
                    await asyncio.sleep(0.001)
                for count, key in enumerate((CRAWLER, CRAWLER, CHAT), 1):
                    running.append(asyncio.ensure_future(complete(client, key)))
                    await wait_for_jobs(served, count)
                served.gate.set()
                first, second, refused, other = await asyncio.gather(*running)
                assert [answer.status_code for answer in (first, second, other)] == [200] * 3
                error = refused.json()["error"]
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
                assert error["code"] == "rate_limit_exceeded" and "for tenant 'crawler'" in error["message"]
                assert "queue_share=0.25 of max_num_queued_reqs=4" in error["message"]

        run(test)
        assert served.state.metrics.events["queue_full"] == 1


def test_metrics_live_and_log_name_the_tenant_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    with serve(rows=2) as served, caplog.at_level(logging.INFO, "jaxserve.access"):
        served.gate = steps = Steps()  # type: ignore[assignment]
        served.state.config = ServerConfig()  # with an access log

        async def look() -> dict[str, Any]:
            taking = asyncio.ensure_future(take_picture(served.state))
            while not taking.done():
                steps.let()
                await asyncio.sleep(0.001)
            return json.loads(taking.result().removeprefix(b"data: "))

        async def test() -> None:
            async with connect(served) as client:
                running = [asyncio.ensure_future(complete(client, key, max_tokens=400)) for key in (CHAT, CRAWLER)]
                while len((picture := await look())["rows"]["running"]) < 2:
                    pass
                shown = {(row["tenant"], row["service_tier"], row["priority"]) for row in picture["rows"]["running"]}
                assert shown == {("chat", "default", 0), ("crawler", "flex", 3)}
                steps.set()
                await asyncio.gather(*running)
                metrics = (await client.get("/metrics", headers={"authorization": f"Bearer {PLAIN}"})).text
                for tenant, tier in (("chat", "default"), ("crawler", "flex")):
                    labels = f'engine="0",model_name="demo",service_tier="{tier}",tenant="{tenant}"'
                    assert f"jaxserve:tenant_requests_total{{{labels}}} 1.0" in metrics
                    assert f"jaxserve:tenant_generation_tokens_total{{{labels}}} 400.0" in metrics
                told = metrics + json.dumps(picture)
                assert not any(secret in told for key in (CHAT, CRAWLER) for secret in (key, hash_key(key).hex()))

        run(test)
    tenants = [getattr(record, "tenant", None) for record in caplog.records if record.name == "jaxserve.access"]
    assert tenants.count("chat") == tenants.count("crawler") == 1
    assert not any(key in caplog.text or hash_key(key).hex() in caplog.text for key in (CHAT, CRAWLER, PLAIN))
