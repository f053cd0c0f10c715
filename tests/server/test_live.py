"""What looks at the engine without asking it for much: the live view and the probe that wants a token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from jaxserve.engine import stats, view
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.engine.engine import Engine
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.engine.prompts import RequestFactory
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import DeadlineError, DeviceStepError, InvalidRequestError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.server import launch, live
from jaxserve.server.app import make_app
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import begin_reading
from jaxserve.server.server_state import ServerState
from tests.engine.helpers import greedy, make_engine
from tests.fake_device import FakeDevice
from tests.server.asgi import Client, make_scope, make_state, wrap_engine


class Served:
    """A server's state over the fake device, whose steps wait for a gate."""

    def __init__(self, **options: Any) -> None:
        self.engine, self.device = make_engine(**options)
        self.gate = threading.Event()
        self.gate.set()
        step = self.engine.step
        self.engine.step = lambda: (self.gate.wait(20), step())[1]  # type: ignore[method-assign, return-value]
        self.num_jobs = 0
        self.thread = EngineThread(self.engine)
        cache = SimpleNamespace(page_size=32, enable_prefix_caching=True)
        factory = RequestFactory(None, vocab_size=1009, eos_token_ids=(), seed=0, max_model_len=512, max_logprobs=5)
        specs, model = (SimpleNamespace(dtype="float32"),), SimpleNamespace(generates=True)
        shapes = SimpleNamespace(config=SimpleNamespace(cache=cache), specs=specs, model=model)
        plan = SimpleNamespace(num_pages=(40,))
        parts = {"requests": factory, "shapes": shapes, "plan": plan, "tokenizer": None}
        self.llm = wrap_engine(self.engine, defaults=GenerationDefaults(SamplingParams()), **parts)
        self.llm._thread = self.thread
        self.state = make_state(access_log=False)
        self.state.llm = self.llm
        call = self.thread.call

        def count(function: Callable[[Engine], Any]) -> Any:
            self.num_jobs += 1
            return call(function)

        self.thread.call = count  # type: ignore[method-assign]

    async def generate(self, request: Request) -> None:
        async for _ in self.llm.stream([request]):
            pass

    async def probe(self) -> tuple[int, dict[str, Any]]:
        answer = await Client().ask(make_app(self.state), make_scope("/health/generate", "GET"))
        return answer.status, json.loads(answer.body)


@contextmanager
def serve(**options: Any) -> Iterator[Served]:
    served = Served(**options)
    try:
        yield served
    finally:
        served.gate.set()
        served.thread.shutdown()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


# The live view


async def watch(state: ServerState, count: int) -> list[bytes]:
    pieces = await begin_reading(live.stream_pictures(state))
    found = [await anext(pieces) for _ in range(count)]
    await pieces.aclose()
    return found


def test_all_who_look_on_share_one_picture_drawn_off_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def draw(engine: Engine) -> str:
        drawn.append(threading.current_thread().name)
        return stats.read_page_map(engine)

    monkeypatch.setattr(view, "read_page_map", draw)
    with serve() as served:

        async def test() -> None:
            found = await asyncio.gather(*(watch(served.state, 2) for _ in range(60)))
            assert all(pieces == found[0] for pieces in found) and found[0][0] != found[0][1]
            picture = json.loads(found[0][0].removeprefix(b"data: "))
            assert picture["rows"]["max"] == 4 and picture["pages"]["map"] == "0" * 39
            assert served.state.num_viewers == 0

        run(test)
        assert len(drawn) == served.num_jobs == 2 and "jaxserve-engine" not in drawn


def test_nobody_looks_when_nobody_looks_on() -> None:
    with serve() as served:

        async def test() -> None:
            await watch(served.state, 1)
            await asyncio.sleep(0.6)

        run(test)
        assert served.num_jobs == 1


def test_viewers_are_counted_and_one_too_many_is_refused() -> None:
    with serve() as served:

        async def test() -> None:
            pieces = [await begin_reading(live.stream_pictures(served.state)) for _ in range(64)]
            with pytest.raises(ApiError, match="64 viewers") as caught:
                await begin_reading(live.stream_pictures(served.state))
            assert (caught.value.status, caught.value.code) == (429, "too_many_viewers")
            for each in pieces[:2]:
                await anext(each)
                await each.aclose()
            assert served.state.num_viewers == 62
            assert len(await watch(served.state, 1)) == 1

        run(test)


# The queue of a server


@pytest.mark.parametrize(("queue", "most"), [(None, 8), (3, 3)])
def test_a_server_bounds_its_queue_where_nobody_did(
    queue: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(rows=2, queue=(queue, None)) as served:
        state = make_state()
        monkeypatch.setattr(AsyncLLM, "from_config", lambda *args, **options: served.llm)
        monkeypatch.setattr(ServerState, "open", lambda state, llm: setattr(state, "llm", llm))
        monkeypatch.setattr(launch, "tune_garbage_collector", lambda: None)
        launch.Server(uvicorn.Config(make_app(state)), state)._build()
        find_room = served.engine.scheduler.queue_admission.find_room
        params = SamplingParams(n=most + 2)
        assert find_room([Request("a", (1,), params)]) == []
        with pytest.raises(InvalidRequestError, match=f"max_num_queued_reqs={most}"):
            find_room([Request("a", (1,), replace(params, n=most + 3))])


# The probe


def test_a_probe_makes_a_token_and_is_shared_for_a_second() -> None:
    with serve() as served:

        async def test() -> None:
            answers = await asyncio.gather(*(served.probe() for _ in range(30)))
            assert answers == [(200, {"status": "ready"})] * 30
            assert served.engine.counts.num_tokens == 1 and served.state.metrics.num_requests == 0

        run(test)


def test_a_probe_waits_neither_for_the_queue_nor_for_a_row() -> None:
    with serve(rows=1, queue=(1, None)) as served:

        async def test() -> None:
            served.gate.clear()
            running = [asyncio.ensure_future(served.generate(greedy(f"r{n}", range(10), 300))) for n in range(2)]
            probing = asyncio.ensure_future(served.llm.check_health())
            await asyncio.sleep(0.05)
            served.gate.set()
            await probing  # somebody else's token came: the only row is taken
            await asyncio.gather(*running)

        run(test)


def test_a_probe_fails_when_no_token_comes() -> None:
    with serve() as served:

        async def test() -> None:
            served.gate.clear()
            with pytest.raises(DeadlineError, match=r"0\.05 s"):
                await served.llm.check_health(0.05)
            served.gate.set()
            await served.llm.check_health()

        run(test)
        assert not served.engine.scheduler.waiting


def test_a_probe_says_that_the_device_fails() -> None:
    with serve() as served:

        async def test() -> None:
            fake: FakeDevice = served.device
            fake.fail_next = RuntimeError("the device broke")
            status, health = await served.probe()
            assert (status, health["reason"]) == (503, "The engine has made no token.")
            served.state.probe._made_at = 0.0
            assert (await served.probe())[0] == 200
            fake.fail_next = RuntimeError("the device broke")
            with pytest.raises(DeviceStepError):
                await served.llm.check_health()

        run(test)


def test_a_probe_of_a_server_that_starts_is_503_at_once() -> None:
    async def test() -> None:
        answer = await Client().ask(make_app(make_state()), make_scope("/health/generate", "GET"))
        assert answer.status == 503

    run(test)
