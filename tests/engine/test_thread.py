"""The engine's thread over the fake device: all or none, aborts, faults that reach everybody, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.inbox import OutputInbox
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import DeviceStepError, EngineStoppedError, InvalidRequestError, QueueFullError
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams
from tests.engine.helpers import greedy, make_engine
from tests.fake_device import continue_alone

VOCABULARY = 1009


def stream(request_id: str, prompt: range, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=OutputKind.DELTA)
    return dataclasses.replace(greedy(request_id, prompt, max_tokens), params=params)


async def read(inbox: OutputInbox) -> list[RequestOutput]:
    outputs = []
    while not inbox.is_done:
        outputs.append(await inbox.get())
    return outputs


async def submit(thread: EngineThread, requests: Sequence[Request]) -> list[RequestOutput]:
    inbox = OutputInbox(requests)
    thread.submit(requests, inbox)
    return await read(inbox)


def run[T](test: Callable[[], Awaitable[T]]) -> T:
    return asyncio.run(asyncio.wait_for(test(), timeout=20))  # type: ignore[arg-type]


@contextmanager
def start(engine: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(engine)
    try:
        yield thread
    finally:
        thread.shutdown()
    assert not engine.has_unfinished
    assert all(pool.num_referenced == 0 for pool in engine.scheduler.pages.pools)


def fail() -> None:
    raise ZeroDivisionError("a bug of ours")


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


def panic() -> None:
    raise Panic("a bug of theirs")


@asynccontextmanager
async def hold(thread: EngineThread) -> AsyncIterator[None]:
    """Keeps the thread from stepping, so that what is submitted inside is there together."""
    gate = threading.Event()
    thread.call(lambda engine: gate.wait(20))
    try:
        yield
        await asyncio.sleep(0)  # the tasks that were made inside submit
    finally:
        gate.set()


class Gate(threading.Event):
    """Where the engine's thread waits until this is set; `reached` is set once it does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


def brake(engine: Engine, num_steps: int) -> Gate:
    """Lets the engine take some steps, and hold before the next one until the gate is set."""
    step, gate, left = engine.step, Gate(), iter(range(num_steps))

    def wait() -> list[RequestOutput]:
        if next(left, None) is None:
            gate.reached.set()
            gate.wait(20)
        return step()

    engine.step = wait  # type: ignore[method-assign]
    return gate


def test_many_streams_get_what_they_would_get_alone() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:

        async def test() -> list[list[RequestOutput]]:
            requests = [stream(f"r{number}", range(number, number + 20), 30) for number in range(12)]
            return await asyncio.gather(*(submit(thread, [request]) for request in requests))

        for number, outputs in enumerate(run(test)):
            ids = [token for output in outputs for token in output.outputs[0].token_ids]
            assert ids == continue_alone(range(number, number + 20), 30, [None], VOCABULARY)
            assert outputs[-1].finished and thread.stopped is None


def test_requests_of_one_call_run_all_or_none() -> None:
    engine, device = make_engine()
    with start(engine) as thread:

        async def test() -> None:
            good, too_long = greedy("good", range(10), 5), greedy("long", range(600), 5)
            inbox = OutputInbox([good, too_long])
            thread.submit([good, too_long], inbox)
            with pytest.raises(InvalidRequestError, match="maximum context length"):
                await inbox.get()
            assert device.plans == [] and not engine.has_unfinished
            outputs = await submit(thread, [good, greedy("other", range(12), 5)])
            assert {output.request_id for output in outputs if output.finished} == {"good", "other"}

        run(test)


def test_a_full_queue_refuses_at_once_and_harms_nobody() -> None:
    engine, _ = make_engine(rows=1, queue=(2, None))
    with start(engine) as thread:

        async def test() -> list[object]:
            async with hold(thread):
                each = [asyncio.ensure_future(submit(thread, [greedy(f"r{n}", range(10), 20)])) for n in range(6)]
            return await asyncio.gather(*each, return_exceptions=True)

        outcomes = run(test)
        refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFullError)]
        assert len(refused) == 3 and all("max_num_queued_reqs=2" in str(error) for error in refused)
        assert all(isinstance(outcome, list) for outcome in outcomes[:3])  # one has the idle row


def test_a_better_request_displaces_the_worst_that_waits() -> None:
    engine, _ = make_engine(rows=1, queue=(1, None))
    with start(engine) as thread:

        async def test() -> list[list[RequestOutput]]:
            async with hold(thread):
                each = [
                    asyncio.ensure_future(submit(thread, [greedy(f"r{priority}", range(10), 20, priority=priority)]))
                    for priority in (1, 3, 2)
                ]
            return await asyncio.gather(*each)

        first, (gone,), better = run(test)
        assert isinstance(gone.error, QueueFullError) and gone.finished and not gone.outputs[0].token_ids
        for outputs in (first, better):
            assert outputs[-1].outputs[0].token_ids == continue_alone(range(10), 20, [None], VOCABULARY)


def test_nobody_makes_way_for_what_cannot_run() -> None:
    engine, _ = make_engine(rows=1, queue=(1, None))
    with start(engine) as thread:

        async def test() -> list[object]:
            async with hold(thread):
                each = [
                    asyncio.ensure_future(submit(thread, [greedy(f"r{n}", range(10), 5, priority=2)])) for n in (1, 2)
                ]
                each.append(asyncio.ensure_future(submit(thread, [greedy("long", range(600), 5)])))
            return await asyncio.gather(*each, return_exceptions=True)

        *fine, refused = run(test)
        assert isinstance(refused, InvalidRequestError)
        assert all(isinstance(outputs, list) and outputs[-1].error is None for outputs in fine)


def test_a_request_beyond_limits_comes_in_and_displaces_nobody() -> None:
    engine, _ = make_engine(rows=1, queue=(1, None))
    with start(engine) as thread:

        async def test() -> list[list[RequestOutput]]:
            async with hold(thread):
                each = [
                    asyncio.ensure_future(submit(thread, [greedy(f"r{n}", range(10), 5, priority=n)])) for n in (1, 2)
                ]
                await asyncio.sleep(0)
                probe = greedy("probe", range(3), 1, priority=-1)
                thread.submit([probe], inbox := OutputInbox([probe]), beyond_limits=True)
            return [*await asyncio.gather(*each), await read(inbox)]

        for outputs in run(test):
            assert outputs[-1].finished and outputs[-1].error is None


def submit_twice(thread: EngineThread) -> tuple[OutputInbox, OutputInbox]:
    """One request of 40 tokens, from two readers."""
    request = greedy("mine", range(10), 40)
    inboxes = OutputInbox([request]), OutputInbox([request])
    for inbox in inboxes:
        thread.submit([request], inbox)
    return inboxes


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:

        async def test() -> list[object]:
            async with hold(thread):
                first, second = submit_twice(thread)
            return await asyncio.gather(read(first), leave(second), return_exceptions=True)

        async def leave(inbox: OutputInbox) -> None:
            """What `AsyncLLM.stream` does."""
            try:
                await inbox.get()
            finally:
                thread.leave(list(inbox.open_requests), inbox)

        first, second = run(test)
        assert isinstance(second, InvalidRequestError)
        assert isinstance(first, list) and len(first[-1].outputs[0].token_ids) == 40


def test_who_leaves_before_the_refusal_ends_no_other_request_of_that_id() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:

        async def test() -> list[RequestOutput]:
            async with hold(thread):
                first, second = submit_twice(thread)
                thread.leave(list(second.open_requests), second)
            return await read(first)

        assert run(test)[-1].outputs[0].token_ids == continue_alone(range(10), 40, [None], VOCABULARY)


def test_abort_ends_a_stream_and_unknown_ids_are_ignored() -> None:
    engine, _ = make_engine()
    gate = brake(engine, 5)
    with start(engine) as thread:

        async def test() -> None:
            request = stream("a", range(10), 400)
            inbox = OutputInbox([request])
            thread.submit([request], inbox)
            await inbox.get()
            thread.abort(["nobody", "a", "a"])
            gate.set()
            outputs = await read(inbox)
            assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
            assert not await asyncio.wrap_future(thread.call(lambda engine: engine.scheduler.has_unfinished))

        run(test)


def test_steps_get_their_turn_however_many_jobs_wait() -> None:
    engine, device = make_engine()
    with start(engine) as thread:

        async def test() -> None:
            seen: list[int] = []
            request = stream("a", range(10), 400)
            async with hold(thread):
                thread.submit([request], inbox := OutputInbox([request]))
                for _ in range(1000):
                    thread.call(lambda engine: seen.append(len(device.plans)))
            await read(inbox)
            assert len(set(seen)) >= 10 and max(map(seen.count, seen)) <= 64

        run(test)


def test_jobs_do_not_hide_that_no_step_ends() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:

        async def test() -> None:
            async with hold(thread):
                reading = asyncio.ensure_future(submit(thread, [greedy("a", range(10), 5)]))
                await asyncio.sleep(0)
                for _ in range(40):
                    thread.call(lambda engine: time.sleep(0.01))
                stalled = thread.call(lambda engine: thread.stalled_seconds())
            assert await asyncio.wrap_future(stalled) >= 0.4
            await reading
            assert thread.call(lambda engine: thread.stalled_seconds()).result(10) == 0.0

        run(test)


def test_call_runs_between_steps_and_brings_errors_back() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:
        name, found = thread.call(lambda engine: (threading.current_thread().name, engine)).result(10)
        assert name == "jaxserve-engine" and found is engine
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda engine: fail()).result(10)
        assert thread.call(lambda engine: 7).result(10) == 7


def test_a_call_that_nobody_waits_for_any_more_harms_nobody() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:

        async def test() -> list[RequestOutput]:
            called: list[Engine] = []
            async with hold(thread):
                future = thread.call(called.append)
                waiting = asyncio.ensure_future(asyncio.wrap_future(future))
                await asyncio.sleep(0)
                waiting.cancel()
            outputs = await submit(thread, [greedy("a", range(10), 5)])
            assert thread.stopped is None and future.cancelled() and not called
            return outputs

        assert run(test)[-1].outputs[0].token_ids == continue_alone(range(10), 5, [None], VOCABULARY)


def test_a_failed_step_ends_its_requests_and_the_thread_goes_on() -> None:
    engine, device = make_engine(rows=2)
    with start(engine) as thread:

        async def test() -> None:
            device.fail_next = RuntimeError("the device broke")
            async with hold(thread):
                each = [asyncio.ensure_future(submit(thread, [greedy(f"r{n}", range(10), 5)])) for n in range(4)]
            outputs = await asyncio.gather(*each)
            errors = [output[-1].error for output in outputs]
            assert [isinstance(error, DeviceStepError) for error in errors] == [True, True, False, False]
            assert outputs[3][-1].outputs[0].token_ids == continue_alone(range(10), 5, [None], VOCABULARY)

        run(test)
    assert engine.counts.num_faults > 0


def test_a_fault_of_the_engine_reaches_every_inbox_and_later_ones() -> None:
    engine, _ = make_engine()
    gate = brake(engine, 5)
    told: list[EngineStoppedError] = []
    thread = EngineThread(engine, told.append)

    async def test() -> None:
        running = [stream(name, range(10), 400) for name in ("a", "b")]
        inboxes = [OutputInbox([request]) for request in running]
        async with hold(thread):
            for request, inbox in zip(running, inboxes, strict=True):
                thread.submit([request], inbox)
        for inbox in inboxes:
            await inbox.get()
        others = [asyncio.ensure_future(submit(thread, [greedy(f"r{n}", range(10), 5)])) for n in range(3)]
        await asyncio.sleep(0)
        engine.scheduler.plan = fail  # type: ignore[method-assign, assignment]
        gate.set()
        for reading in (*map(read, inboxes), *others, submit(thread, [greedy("late", range(10), 5)])):
            with pytest.raises(EngineStoppedError, match="a bug of ours"):
                await reading
        thread.abort(["a", "late"])
        with pytest.raises(EngineStoppedError):
            await asyncio.wrap_future(thread.call(lambda engine: engine.step()))

    run(test)
    assert told == [thread.stopped] and isinstance(told[0].__cause__, ZeroDivisionError)
    thread.shutdown()
    assert len(told) == 1


def test_giving_up_tells_everybody_though_the_device_never_answers() -> None:
    engine, _ = make_engine()
    gate = brake(engine, 5)
    thread = EngineThread(engine)
    lost = DeviceStepError("the device is gone")

    async def test() -> None:
        inbox = OutputInbox([stream("a", range(10), 400)])
        thread.submit([stream("a", range(10), 400)], inbox)
        await inbox.get()
        assert await asyncio.to_thread(gate.reached.wait, 20)
        waiting = asyncio.ensure_future(asyncio.wrap_future(thread.call(lambda engine: None)))
        await asyncio.sleep(0)
        thread.give_up(lost)
        for reading in (read(inbox), submit(thread, [greedy("late", range(10), 5)]), waiting):
            with pytest.raises(EngineStoppedError, match="the device is gone"):
                await reading

    run(test)
    gate.set()
    thread.shutdown()


def test_a_panic_hangs_nobody() -> None:
    engine, _ = make_engine()
    thread = EngineThread(engine)

    async def test() -> None:
        with pytest.raises(Panic):
            await asyncio.wrap_future(thread.call(lambda engine: panic()))
        assert (await submit(thread, [greedy("fine", range(10), 5)]))[-1].finished
        engine.scheduler.plan = panic  # type: ignore[method-assign, assignment]
        for name in ("a", "late"):
            with pytest.raises(EngineStoppedError, match="a bug of theirs"):
                await submit(thread, [greedy(name, range(10), 5)])

    run(test)
    thread.shutdown()


@pytest.mark.parametrize("fault", [fail, panic])
def test_a_fault_while_a_request_is_added_reaches_that_request_too(fault: Callable[[], None]) -> None:
    engine, _ = make_engine()
    thread = EngineThread(engine)
    engine.add_request = lambda request: fault()  # type: ignore[method-assign, assignment]

    async def test() -> None:
        with pytest.raises(EngineStoppedError, match="a bug of"):
            await submit(thread, [greedy("a", range(10), 5)])

    run(test)
    thread.shutdown()


def test_who_waits_is_told_even_if_on_stop_fails() -> None:
    engine, _ = make_engine()

    def refuse(error: EngineStoppedError) -> None:
        raise RuntimeError("the event loop is closed")

    thread = EngineThread(engine, refuse)
    engine.scheduler.plan = fail  # type: ignore[method-assign, assignment]

    async def test() -> None:
        for name in ("a", "b"):
            with pytest.raises(EngineStoppedError):
                await submit(thread, [greedy(name, range(10), 5)])

    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        run(test)
        thread.shutdown()
    finally:
        threading.excepthook = hook


def test_after_shutdown_nobody_waits_for_ever() -> None:
    engine, _ = make_engine()
    gate = brake(engine, 5)
    thread = EngineThread(engine)

    async def test() -> None:
        request = stream("a", range(10), 400)
        inbox = OutputInbox([request])
        thread.submit([request], inbox)
        await inbox.get()
        ending = asyncio.ensure_future(asyncio.to_thread(thread.shutdown))
        while thread._jobs.empty() and not ending.done():
            await asyncio.sleep(0.001)
        gate.set()
        await ending
        assert (await read(inbox))[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineStoppedError, match="shut down"):
            await submit(thread, [greedy("late", range(10), 5)])
        with pytest.raises(EngineStoppedError, match="shut down"):
            await asyncio.wrap_future(thread.call(lambda engine: 7))
        thread.abort(["a"])
        thread.shutdown()

    run(test)
    assert not engine.has_unfinished


def test_requests_of_an_event_loop_that_is_closed_are_dropped() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:

        async def leave() -> None:
            request = stream("left", range(10), 500)
            inbox = OutputInbox([request])
            thread.submit([request], inbox)
            await inbox.get()

        run(leave)

        async def test() -> None:
            outputs = await submit(thread, [greedy("other", range(10), 30)])
            assert outputs[-1].outputs[0].token_ids == continue_alone(range(10), 30, [None], VOCABULARY)

        run(test)
        deadline = time.monotonic() + 10
        while thread.call(lambda engine: engine.has_unfinished).result(10) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine.has_unfinished, "nobody reads it, so it must not run to its end"


def test_a_step_that_does_not_end_shows_and_passes() -> None:
    engine, _ = make_engine()
    with start(engine) as thread:
        assert thread.stalled_seconds() == 0.0
        step, gate = engine.step, threading.Event()

        def wait() -> list[RequestOutput]:
            gate.wait(10)
            return step()

        engine.step = wait  # type: ignore[method-assign]

        async def test() -> None:
            answer = asyncio.ensure_future(submit(thread, [greedy("a", range(10), 5)]))
            while thread.stalled_seconds() < 0.2:
                await asyncio.sleep(0.01)
            gate.set()
            assert (await answer)[-1].finished

        run(test)
        assert thread.stalled_seconds() == 0.0
