"""Two nodes answer as one process does: every kind of request, under load, with pages that run out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.nodes.nodes import Node, run_one, run_pair

# Fewer pages than four rows can need: some sequences are preempted.
# No request is refused because a busy machine is slow.
FLAGS = ("--page-size", "16", "--num-kv-pages-override", "16", "--max-queue-wait", "0")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
LONG = "The quick brown fox jumps over the lazy dog. " * 3


def complete(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "demo", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, **fields}


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 40, **fields}
    return "/v1/chat/completions", body


REQUESTS = [
    complete("What is a cache?", temperature=0),
    complete("What is a cache?", temperature=1, seed=3),
    complete(LONG, temperature=0, max_tokens=90),
    complete(LONG + "Again.", temperature=0.8, seed=4, top_p=0.9, top_k=20, max_tokens=90),
    complete("one two three", temperature=0.7, seed=5, presence_penalty=1.0, frequency_penalty=0.5),
    complete("one two three", temperature=0, repetition_penalty=1.3, min_tokens=20, stop=["the"]),
    complete("one two three", temperature=1, seed=6, n=3),
    complete(LONG, temperature=0, prompt_logprobs=3, logprobs=3, max_tokens=8),
    complete("four five", temperature=0, logit_bias={"40": 5.0, "41": -100}, bad_words=["a"]),
    complete("An answer:", temperature=0, structured_outputs={"regex": "(yes|no), [0-9]{2,4}"}),
    chat("What is 2+3?", temperature=0, logprobs=True, top_logprobs=2),
    chat(
        "A person, please.",
        temperature=0.9,
        seed=8,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    ),
    ("/v1/embeddings", {"model": "demo", "input": ["What is a cache?", LONG]}),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    with run_pair("demo", *FLAGS) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def alone() -> Iterator[Node]:
    with run_one("demo", *FLAGS) as node:
        yield node


async def send_all(node: Node) -> list[Any]:
    async with httpx.AsyncClient(base_url=node.url, timeout=120) as client:
        leaving = asyncio.ensure_future(leave_early(client))
        answers = await asyncio.gather(*(client.post(path, json=body) for path, body in REQUESTS))
        await leaving
        for answer in answers:
            assert answer.status_code == 200, answer.text
        return [answer.json().get("choices") or answer.json()["data"] for answer in answers]


async def leave_early(client: httpx.AsyncClient) -> None:
    """A client that goes after a few chunks."""
    path, body = complete("I shall leave.", temperature=0, max_tokens=200)
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        count = 0
        async for _ in answer.aiter_lines():
            count += 1
            if count > 6:
                return


def test_every_kind_of_request_is_answered_alike(pair: list[Node], alone: Node) -> None:
    expected = asyncio.run(send_all(alone))
    for turn in range(2):  # the second finds cached prefixes
        found = asyncio.run(send_all(pair[0]))
        for (path, body), one, other in zip(REQUESTS, expected, found, strict=True):
            assert_alike(other, one, f"turn {turn}: {path} {body}")
    assert pair[0].metric("jaxserve:num_preemptions_total") > 0
    assert pair[0].metric("jaxserve:prefix_cache_hits_total") > 0


def test_nothing_compiles_after_ready_on_either_host(pair: list[Node]) -> None:
    asyncio.run(send_all(pair[0]))
    assert pair[0].metric("jaxserve:compiles_total") == 0
    assert pair[1].metric("jaxserve:follower_compiles") == 0
    assert pair[1].metric("jaxserve:follower_steps") > 100


def assert_alike(found: Any, expected: Any, where: str) -> None:
    """Equal values; numbers that are computed on the device to 1e-4."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_alike(found[name], value, f"{where}: {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other, where)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4), where
    else:
        assert found == expected, where
