"""Bodies of many texts, in process, over the fake device: they are computed in parts and never refused half way."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from jaxserve.core.layers.pooling import LAST
from jaxserve.errors import QueueFullError
from jaxserve.request import Request
from jaxserve.server.app import make_app
from tests.engine.helpers import greedy
from tests.fake_device import continue_alone, embed_alone
from tests.server.asgi import Client, make_scope
from tests.server.test_live import Served, run, serve

ROWS = 2
TEXTS = [[number % 7, number, 5] for number in range(40)]
PATH = "/v1/embeddings"
POOLER = replace(LAST, trained_sizes=(1,))


@contextmanager
def serve_embeddings(queued: int | None = 4 * ROWS) -> Iterator[Served]:
    with serve(rows=ROWS, queue=(queued, None)) as served:
        model = SimpleNamespace(embedding_size=2, pooler=POOLER, vocab_size=1009, generates=False)
        served.llm.ready.shapes.model = model  # type: ignore[misc]
        yield served


async def ask(served: Served, *bodies: dict[str, Any], path: str = PATH) -> list[httpx.Response]:
    """Sends bodies at the same time."""
    transport = httpx.ASGITransport(make_app(served.state))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await asyncio.gather(*(client.post(path, json=body) for body in bodies))


def note_parts(served: Served) -> list[int]:
    """The sizes of all parts that ask for room from now on."""
    sizes: list[int] = []
    find_room = served.engine.scheduler.queue_admission.find_room

    def note(requests: Sequence[Request]) -> list[tuple[str, QueueFullError]]:
        sizes.append(len(requests))
        return find_room(requests)

    served.engine.scheduler.queue_admission.find_room = note  # type: ignore[method-assign]
    return sizes


def refuse(served: Served, answers: Iterator[bool]) -> None:
    """Has the queue refuse the parts for which `answers` says so."""
    find_room = served.engine.scheduler.queue_admission.find_room

    def refuse_some(requests: Sequence[Request]) -> list[tuple[str, QueueFullError]]:
        if next(answers):
            raise QueueFullError("the queue is full", limit=1, queued=1)
        return find_room(requests)

    served.engine.scheduler.queue_admission.find_room = refuse_some  # type: ignore[method-assign]


def check(answer: httpx.Response, texts: Sequence[list[int]]) -> None:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [item["index"] for item in found["data"]] == list(range(len(texts)))
    assert [item["embedding"] for item in found["data"]] == [embed_alone(text, [None]) for text in texts]
    count = sum(map(len, texts))
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


@pytest.mark.parametrize("queued", [None, 8, 1])
def test_few_rows_compute_many_texts(queued: int | None) -> None:
    with serve_embeddings(queued) as served:
        sizes = note_parts(served)

        async def test() -> None:
            (answer,) = await ask(served, {"input": TEXTS})
            check(answer, TEXTS)

        run(test)
        assert sizes == [ROWS] * (len(TEXTS) // ROWS)


def test_both_forms_are_the_same_numbers() -> None:
    with serve_embeddings() as served:

        async def test() -> None:
            body: dict[str, Any] = {"input": TEXTS[:3], "dimensions": 1}
            numbers, text = await ask(served, body, body | {"encoding_format": "base64"})
            for one, other in zip(numbers.json()["data"], text.json()["data"], strict=True):
                assert one["embedding"] == np.frombuffer(base64.b64decode(other["embedding"]), np.float32).tolist()
                assert one["embedding"] in ([1.0], [0.0])

        run(test)


def test_bodies_do_not_refuse_each_other() -> None:
    """Eight of forty texts: together twenty times what the queue holds, but each sends no more than there are rows."""
    with serve_embeddings(8 * ROWS) as served:

        async def test() -> None:
            for answer in await ask(served, *[{"input": TEXTS}] * 8):
                check(answer, TEXTS)

        run(test)
        assert not served.state.metrics.events["queue_full"]


def test_a_body_that_was_let_in_waits_for_room() -> None:
    with serve_embeddings() as served:
        refuse(served, iter([False, True, True, True, False, *[False, True] * 100]))

        async def test() -> None:
            (answer,) = await ask(served, {"input": TEXTS[:9]})
            check(answer, TEXTS[:9])

        run(test)
        assert not served.state.metrics.events["queue_full"]


def test_one_text_that_finds_room_lets_a_body_in() -> None:
    with serve_embeddings() as served:
        refuse(served, iter([True, *[False] * 100]))

        async def test() -> None:
            (answer,) = await ask(served, {"input": TEXTS})
            check(answer, TEXTS)

        run(test)


def test_a_body_without_room_for_one_text_is_refused_at_once() -> None:
    with serve_embeddings() as served:
        refuse(served, iter([True, True]))

        async def test() -> None:
            (answer,) = await ask(served, {"input": TEXTS})
            assert answer.status_code == 429 and answer.headers["retry-after"]

        run(test)
        assert served.state.metrics.events["queue_full"] == 1


def test_waiting_for_room_ends_at_the_deadline() -> None:
    with serve_embeddings() as served:
        refuse(served, iter([False, *[True] * 10_000]))

        async def test() -> None:
            (answer,) = await ask(served, {"input": TEXTS, "timeout": 0.5})
            assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"

        run(test)


def test_a_body_may_have_as_many_texts_as_with_openai() -> None:
    with serve_embeddings() as served:

        async def test() -> None:
            most, more = await ask(served, {"input": [[7]] * 2048}, {"input": [[7]] * 2049})
            check(most, [[7]] * 2048)
            assert more.status_code == 400 and more.json()["error"]["param"] == "input"

        run(test)


LONG_LISTS = pytest.mark.parametrize("path", [PATH, "/pooling"])


@LONG_LISTS
def test_others_keep_their_turn_beside_a_thousand_texts(path: str) -> None:
    with serve_embeddings() as served:
        sizes = note_parts(served)

        async def test() -> None:
            many = asyncio.create_task(ask(served, {"input": [[7]] * 1000}, path=path))
            while len(sizes) < 3:
                await asyncio.sleep(0)
            outputs = [output async for output in served.llm.stream([greedy("other", [5, 6], 3)])]
            assert not many.done()
            assert outputs[-1].outputs[0].token_ids == continue_alone([5, 6], 3, [None], 1009)
            (answer,) = await many
            vectors = [each.get("embedding") or each["data"] for each in answer.json()["data"]]
            assert vectors == [embed_alone([7], [None])] * 1000
            assert all(pool.num_referenced == 0 for pool in served.engine.scheduler.pages.pools)

        run(test)


@LONG_LISTS
def test_a_client_that_leaves_frees_all_that_wait(path: str) -> None:
    with serve_embeddings() as served:
        sizes = note_parts(served)

        async def test() -> None:
            client, body = Client(), json.dumps({"input": [[7]] * 1000}).encode()
            client._body = [{"type": "http.request", "body": body, "more_body": False}]
            head = [("content-type", "application/json"), ("content-length", str(len(body)))]
            call = asyncio.create_task(client.ask(make_app(served.state), make_scope(path, headers=head)))
            while len(sizes) < 3:
                await asyncio.sleep(0)
            client.left.set()
            await call
            begun = len(sizes)
            while served.engine.has_unfinished:
                await asyncio.sleep(0)
            assert len(sizes) == begun < 500, "no part begins once the client has left"
            assert all(pool.num_referenced == 0 for pool in served.engine.scheduler.pages.pools)
            assert served.state.metrics.events["client_disconnects"] == 1
            (next_one,) = await ask(served, {"input": [[7]]}, path=path)
            assert next_one.status_code == 200

        run(test)
