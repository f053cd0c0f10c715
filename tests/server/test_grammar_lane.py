"""New grammars: one of a key at a time, a budget for each key, and nobody else pays for a hostile one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve.server.errors import ApiError
from jaxserve.server.grammar_lane import GrammarLane
from jaxserve.structured_params import StructuredOutputsParams


class Compiler:
    """Takes a second of the test's clock for each grammar; hostile ones last until `release` is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.release = threading.Event()
        self.compiled: list[str] = []

    def compile(self, params: StructuredOutputsParams) -> str:
        word = str(params.regex)
        if word.startswith("hostile"):
            assert self.release.wait(60)
        self.compiled.append(word)
        self.now += 1.0
        if word == "bad":
            raise ValueError("no grammar")
        return word.upper()


Ask = Callable[..., Coroutine[Any, Any, Any]]


def run(test: Callable[[Ask, Compiler], Coroutine[Any, Any, None]], budget_s: float = 0.0) -> None:
    compiler = Compiler()

    async def start() -> None:
        lane = GrammarLane(budget_s, clock=lambda: compiler.now)

        async def ask(owner: str, word: str, longest_wait: float | None = None) -> Any:
            params = StructuredOutputsParams(regex=word)
            return await lane.compile(compiler.compile, params, owner=owner, longest_wait=longest_wait)

        assert not lane.is_busy
        await test(ask, compiler)
        assert not lane.is_busy

    try:
        asyncio.run(asyncio.wait_for(start(), 60))
    finally:
        compiler.release.set()


def test_a_keys_further_grammars_wait_for_a_bounded_time_and_other_keys_take_their_turn() -> None:
    async def test(ask: Ask, compiler: Compiler) -> None:
        hostile = [asyncio.ensure_future(ask("a", f"hostile{number}", 0.05)) for number in range(30)]
        _, _ = await asyncio.wait(hostile, return_when=asyncio.FIRST_EXCEPTION)
        other = asyncio.ensure_future(ask("b", "word", 0.05))
        found = await asyncio.gather(*hostile[1:], return_exceptions=True)
        assert {(error.status, error.code) for error in found} == {(429, "too_many_grammars")}  # type: ignore[union-attr]
        assert all(error.headers["Retry-After"] for error in found)  # type: ignore[union-attr]
        assert not other.done() and not hostile[0].done()
        compiler.release.set()
        assert await other == "WORD", "however long another key's took"
        assert await hostile[0] == "HOSTILE0"

    run(test)


def test_one_grammar_that_many_ask_for_is_compiled_once() -> None:
    async def test(ask: Ask, compiler: Compiler) -> None:
        many = [asyncio.ensure_future(ask(owner, "hostile", 0.0)) for owner in "aaab"]
        await asyncio.sleep(0.01)
        many[0].cancel()  # its client leaves; the others still get it
        compiler.release.set()
        assert await asyncio.gather(*many[1:]) == ["HOSTILE"] * 3
        assert compiler.compiled == ["hostile"]

    run(test)


def test_a_key_that_has_used_up_its_time_is_refused_until_it_is_given_back() -> None:
    async def test(ask: Ask, compiler: Compiler) -> None:
        for number in range(3):
            assert await ask("a", f"w{number}") == f"W{number}"
        with pytest.raises(ApiError, match="more than 2 s in a minute") as caught:
            await ask("a", "more")
        assert caught.value.status == 429
        assert await ask("b", "more") == "MORE", "another key has its own"
        compiler.now += float(caught.value.headers["Retry-After"])
        assert await ask("a", "again") == "AGAIN"

    run(test, budget_s=2.0)


def test_a_bad_grammar_is_its_own_requests_error() -> None:
    async def test(ask: Ask, compiler: Compiler) -> None:
        with pytest.raises(ValueError, match="no grammar"):
            await ask("a", "bad")
        assert await ask("a", "good", 0.0) == "GOOD"

    run(test)
