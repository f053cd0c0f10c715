"""The health of an engine: whether it still makes tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxserve.engine.engine_counts import EngineCounts
from jaxserve.errors import DeadlineError
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
_LOOK_INTERVAL = 0.02  # seconds


async def wait_for_token(outputs: AsyncGenerator[RequestOutput], counts: EngineCounts, timeout: float) -> None:
    """Returns once the engine has made a token, for `outputs` or any other request.

    Args:
        outputs: the stream of a request of one token; it is closed.
        timeout: seconds to wait.

    Raises:
        DeadlineError: no token came in time.
        JaxServeError: the request failed.
    """
    before, deadline = counts.num_tokens, time.monotonic() + timeout
    answer = asyncio.ensure_future(_read(outputs))
    try:
        while not answer.done() and counts.num_tokens == before and time.monotonic() < deadline:
            await asyncio.wait((answer,), timeout=_LOOK_INTERVAL)
        if answer.done():
            answer.result()
        elif counts.num_tokens == before:
            raise DeadlineError(f"no token came within {timeout:g} s")
    finally:
        answer.cancel()


async def _read(outputs: AsyncGenerator[RequestOutput]) -> None:
    async with aclosing(outputs):
        async for output in outputs:
            if output.error is not None:
                raise output.error
