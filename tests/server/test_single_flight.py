"""A shared value is made once for all who ask within its time, errors included, and never without anybody asking."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.server.single_flight import SingleFlight


class Maker:
    """Counts how often it makes the value, which waits for its gate."""

    def __init__(self) -> None:
        self.count, self.gate, self.error = 0, asyncio.Event(), None
        self.gate.set()

    async def make(self) -> int:
        self.count += 1
        count = self.count
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return count


def test_one_value_serves_all_who_ask() -> None:
    async def test() -> None:
        shared, maker = SingleFlight[int](3600.0), Maker()
        maker.gate.clear()
        asking = [asyncio.ensure_future(shared.get(maker.make)) for _ in range(50)]
        await asyncio.sleep(0)
        asking[0].cancel()  # who asked first may leave
        maker.gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError) and answers[1:] == [1] * 49
        assert await shared.get(maker.make) == 1 and maker.count == 1
        assert 3590 < shared.seconds_left <= 3600

    asyncio.run(test())


def test_a_value_that_is_old_is_made_again_but_never_two_at_once() -> None:
    async def test() -> None:
        shared, maker = SingleFlight[int](0.0), Maker()
        assert [await shared.get(maker.make) for _ in range(3)] == [1, 2, 3]
        maker.gate.clear()
        asking = [asyncio.ensure_future(shared.get(maker.make)) for _ in range(5)]
        await asyncio.sleep(0.01)
        maker.gate.set()
        assert await asyncio.gather(*asking) == [4] * 5

    asyncio.run(test())


def test_an_error_is_shared_and_passes() -> None:
    async def test() -> None:
        shared, maker = SingleFlight[int](0.0), Maker()
        maker.error = ValueError("no")  # type: ignore[assignment]
        answers = await asyncio.gather(*(shared.get(maker.make) for _ in range(4)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {ValueError} and maker.count == 1
        maker.error = None
        assert await shared.get(maker.make) == 2
        with pytest.raises(ValueError, match="other"):
            maker.error = ValueError("other")  # type: ignore[assignment]
            await shared.get(maker.make)

    asyncio.run(test())
