"""The thread that compiles new grammars, and how keys share it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jaxserve.server.errors import ApiError
from jaxserve.structured_params import StructuredOutputsParams

_PERIOD_S = 60.0  # of the budget
_RETRY_AFTER = 5  # seconds; the longest that one grammar takes


class NewGrammarError(Exception):
    """A request needs a grammar that is not compiled yet."""

    def __init__(self, params: StructuredOutputsParams) -> None:
        super().__init__("a grammar must be compiled")
        self.params = params


@dataclass(slots=True)
class _Use:
    """What one key uses of the thread."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    seconds: float = 0.0  # spent, less what the time since has given back
    time: float = 0.0  # when `seconds` was right

    def spend(self, seconds: float, budget: float, now: float) -> float:
        """Adds seconds to those spent, and returns them. A whole budget is given back within a period."""
        given_back = (now - self.time) * budget / _PERIOD_S
        self.seconds, self.time = max(0.0, self.seconds - given_back) + seconds, now
        return self.seconds


class GrammarLane:
    """A thread of its own for grammars that were never compiled: a hostile one takes seconds.

    Each key has one grammar at a time in line, so keys take turns; its others wait behind that one, for a bounded time.
    A key that has used up its time is refused until some of it is given back. Only the event loop may use it.
    """

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts nothing. `budget_s`: seconds of the thread for one key in a minute; 0: no limit."""
        self._budget_s, self._clock = budget_s, clock
        self._threads = ThreadPoolExecutor(1, "jaxserve-grammar")
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)  # by owner; there are as many as keys
        self._compiling: dict[str, asyncio.Task[Any]] = {}  # by the constraint's key

    @property
    def is_busy(self) -> bool:
        """Whether the thread works or has work."""
        return bool(self._compiling)

    async def compile(
        self,
        compile_it: Callable[[StructuredOutputsParams], Any],
        params: StructuredOutputsParams,
        *,
        owner: str,
        longest_wait: float | None,
    ) -> Any:
        """Returns `compile_it(params)`, run in the thread.

        Args:
            owner: whose request it is: stands for an API key.
            longest_wait: seconds to wait for the owner's other grammars; None: no limit.

        Raises:
            ApiError: 429 when the owner's other grammars take too long, or have taken too much time.
            InvalidRequestError, CheckerError: as `compile_it` raises them.
        """
        if params.key not in self._compiling:
            use = self._uses[owner]
            await _take_turn(use, longest_wait)
            if params.key in self._compiling:  # another request began it meanwhile
                use.turn.release()
            else:
                self._begin(compile_it, params, use)
        return await asyncio.shield(self._compiling[params.key])

    def _begin(self, compile_it: Callable[..., Any], params: StructuredOutputsParams, use: _Use) -> None:
        """Starts to compile, whoever still waits for it. The turn, which the caller has taken, ends with it."""
        if self._budget_s and (excess := use.spend(0.0, self._budget_s, self._clock()) - self._budget_s) >= 0:
            use.turn.release()
            message = f"The new grammars of this key took more than {self._budget_s:g} s in a minute; try again."
            raise _refuse(message, math.ceil((excess + 1.0) * _PERIOD_S / self._budget_s))
        self._compiling[params.key] = asyncio.ensure_future(self._compile(compile_it, params, use))

    async def _compile(self, compile_it: Callable[..., Any], params: StructuredOutputsParams, use: _Use) -> Any:
        took: list[float] = []

        def work() -> Any:
            start = self._clock()
            try:
                return compile_it(params)
            finally:
                took.append(self._clock() - start)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            use.spend(sum(took), self._budget_s, self._clock())
            del self._compiling[params.key]
            use.turn.release()


async def _take_turn(use: _Use, longest_wait: float | None) -> None:
    try:
        async with asyncio.timeout(longest_wait):
            await use.turn.acquire()
    except TimeoutError:
        raise _refuse("Other new grammars of this key are being compiled; try again.", _RETRY_AFTER) from None


def _refuse(message: str, retry_after: int) -> ApiError:
    return ApiError(429, message, code="too_many_grammars", headers={"Retry-After": str(retry_after)})
