"""What is unread is merged, comes in order, and costs no more than the answers themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jaxserve.engine.inbox import OutputInbox
from jaxserve.errors import DeadlineError, EngineStoppedError
from jaxserve.request import CompletionOutput, Logprob, Request, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams


def make_request(request_id: str, kind: OutputKind = OutputKind.DELTA, n: int = 1) -> Request:
    params = SamplingParams(output_kind=kind, n=n, temperature=1.0, logprobs=1)
    return Request(request_id, (1, 2), params)


def make_output(
    request_id: str, text: str, ids: list[int], *, index: int = 0, reason: str | None = None, finished: bool = False
) -> RequestOutput:
    logprobs = [{token: Logprob(-float(token), 1)} for token in ids]
    completion = CompletionOutput(index, text, ids, reason, None, -float(sum(ids)), logprobs)
    return RequestOutput(request_id, None, [1, 2], [completion], finished)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), timeout=20))  # type: ignore[arg-type]


def test_deltas_that_nobody_read_are_one() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a")])
        inbox.put(make_output("a", "one ", [1]))
        inbox.put(make_output("a", "two ", [2, 3]))
        inbox.put(make_output("a", "three", [4], reason="stop", finished=True))
        assert not inbox.open_requests and not inbox.is_done
        output = await inbox.get()
        (completion,) = output.outputs
        assert (completion.text, completion.token_ids) == ("one two three", [1, 2, 3, 4])
        assert completion.logprobs is not None
        assert [token for position in completion.logprobs for token in position] == [1, 2, 3, 4]
        assert (completion.finish_reason, output.finished, completion.cumulative_logprob) == ("stop", True, -4.0)
        assert inbox.is_done

    run(test)


def test_what_was_read_is_not_merged_again() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a")])
        inbox.put(make_output("a", "one ", [1]))
        assert (await inbox.get()).outputs[0].text == "one "
        inbox.put(make_output("a", "two", [2], reason="length", finished=True))
        assert (await inbox.get()).outputs[0].text == "two"
        assert inbox.is_done

    run(test)


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY])
def test_outputs_that_hold_everything_replace_each_other(kind: OutputKind) -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a", kind)])
        inbox.put(make_output("a", "one ", [1]))
        inbox.put(make_output("a", "one two", [1, 2], reason="stop", finished=True))
        assert (await inbox.get()).outputs[0].text == "one two"
        assert inbox.is_done

    run(test)


def test_each_request_is_merged_as_its_own_kind_says() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("delta"), make_request("whole", OutputKind.CUMULATIVE)])
        for name, texts in (("delta", ("one ", "two")), ("whole", ("one ", "one two"))):
            inbox.put(make_output(name, texts[0], [1]))
            inbox.put(make_output(name, texts[1], [2], reason="stop", finished=True))
        assert [(await inbox.get()).outputs[0].text for _ in range(2)] == ["one two", "one two"]
        assert inbox.is_done

    run(test)


def test_completions_stay_apart_and_the_last_output_stands_last() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a", n=3)])
        for token in range(4):
            for index in (2, 0, 1):
                inbox.put(make_output("a", f"{index}.{token} ", [10 * index + token], index=index))
        inbox.put(make_output("a", "", [], index=1, reason="stop"))
        inbox.put(make_output("a", "", [], index=0, reason="stop"))
        inbox.put(make_output("a", "end", [29], index=2, reason="length", finished=True))
        outputs = [await inbox.get() for _ in range(3)]
        assert inbox.is_done
        assert [output.finished for output in outputs] == [False, False, True]
        texts = {output.outputs[0].index: output.outputs[0].text for output in outputs}
        assert texts == {
            i: "".join(f"{i}.{token} " for token in range(4)) + ("end" if i == 2 else "") for i in range(3)
        }

    run(test)


def test_an_abort_of_all_completions_at_once_comes_after_their_texts() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a", n=2)])
        inbox.put(make_output("a", "x", [1], index=0))
        inbox.put(make_output("a", "y", [2], index=1))
        rest = make_output("a", "X", [3], index=0, reason="abort", finished=True)
        rest.outputs.append(CompletionOutput(1, "Y", [4], "abort"))
        inbox.put(rest)
        outputs = [await inbox.get() for _ in range(3)]
        pieces = [(c.index, c.text) for output in outputs for c in output.outputs]
        assert sorted(pieces) == [(0, "X"), (0, "x"), (1, "Y"), (1, "y")] and outputs[-1].finished
        assert inbox.is_done

    run(test)


def test_several_requests_end_one_by_one() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a"), make_request("b")])
        inbox.put(make_output("b", "b", [1], reason="stop", finished=True))
        assert inbox.open_requests == {"a"} and not inbox.is_done
        assert (await inbox.get()).request_id == "b"
        assert not inbox.is_done
        inbox.put(make_output("a", "a", [1], reason="stop", finished=True))
        assert (await inbox.get()).request_id == "a"
        assert inbox.is_done

    run(test)


def test_an_error_comes_after_what_was_there_before_it_and_stays() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a")])
        inbox.put(make_output("a", "one", [1]))
        inbox.put(EngineStoppedError("the engine stopped"))
        assert not inbox.open_requests, "nothing is left that could be aborted: its id may be another's"
        assert (await inbox.get()).outputs[0].text == "one"
        for _ in range(2):
            assert not inbox.is_done
            with pytest.raises(EngineStoppedError):
                await inbox.get()

    run(test)


def test_a_reader_that_waits_is_woken_by_outputs_and_by_errors() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a")])
        reading = asyncio.ensure_future(inbox.get())
        await asyncio.sleep(0)
        assert not reading.done()
        inbox.put(make_output("a", "one", [1]))
        assert (await reading).outputs[0].text == "one"
        reading = asyncio.ensure_future(inbox.get())
        await asyncio.sleep(0)
        inbox.put(DeadlineError("late"))
        with pytest.raises(DeadlineError):
            await reading

    run(test)


def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a")])
        reading = asyncio.ensure_future(inbox.get())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        inbox.put(make_output("a", "one", [1]))
        assert (await inbox.get()).outputs[0].text == "one"

    run(test)


def test_ten_thousand_unread_outputs_are_a_few() -> None:
    async def test() -> None:
        inbox = OutputInbox([make_request("a", n=2), make_request("b")])
        for token in range(10_000):
            inbox.put(make_output("a", "x", [token], index=token % 2))
            inbox.put(make_output("b", "y", [token]))
        assert len(inbox._unread) == 3
        lengths = [len((await inbox.get()).outputs[0].token_ids) for _ in range(3)]
        assert sorted(lengths) == [5_000, 5_000, 10_000]

    run(test)
