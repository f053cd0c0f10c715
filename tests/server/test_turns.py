"""The threads that prepare requests: a request answers for its own time, never for its wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from jaxserve.server.errors import ApiError
from jaxserve.server.preparation import Preparation

NUM_HELD = 4  # all threads of the quick lane


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_a_wait_for_a_thread_is_not_the_requests_own_time() -> None:
    async def test() -> None:
        preparation, release = Preparation(0.2), threading.Event()
        held = [asyncio.ensure_future(preparation.run(release.wait, 60)) for _ in range(NUM_HELD)]
        await asyncio.sleep(0)
        waits = asyncio.ensure_future(preparation.run(lambda: "mine"))
        errors = await asyncio.gather(*held, return_exceptions=True)
        assert [(error.status, error.code) for error in errors] == [(400, "preparation_timeout")] * NUM_HELD  # type: ignore[union-attr]
        assert not waits.done() and preparation.is_busy, "the threads still work"
        release.set()
        assert await waits == "mine"

    run(test())


def test_who_waits_too_long_for_a_thread_is_told_to_come_again() -> None:
    async def test() -> None:
        preparation, release = Preparation(60.0), threading.Event()
        held = [asyncio.ensure_future(preparation.run(release.wait, 60)) for _ in range(NUM_HELD)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="try again") as caught:
            await preparation.run(lambda: "mine", longest_wait=0.01)
        assert (caught.value.status, caught.value.code) == (429, "preparation_busy")
        assert int(caught.value.headers["Retry-After"]) > 0
        release.set()
        assert await asyncio.gather(*held) == [True] * NUM_HELD
        assert await preparation.run(lambda: "mine", longest_wait=0.01) == "mine"

    run(test())


def test_a_thread_is_taken_until_its_function_returns_whoever_left() -> None:
    async def test() -> None:
        preparation, release = Preparation(60.0), threading.Event()
        held = [asyncio.ensure_future(preparation.run(release.wait, 60)) for _ in range(NUM_HELD)]
        await asyncio.sleep(0.01)
        for task in held:
            task.cancel()
        await asyncio.wait(held)
        with pytest.raises(ApiError, match="try again"):
            await preparation.run(lambda: "mine", longest_wait=0.01)
        release.set()
        assert await preparation.run(lambda: "mine") == "mine"

    run(test())
