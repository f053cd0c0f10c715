"""Where the outputs of requests wait for the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from jaxserve.errors import JaxServeError
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import OutputKind

Item = RequestOutput | JaxServeError


class OutputInbox:
    """The unread outputs of a few requests that one coroutine reads together.

    What is not read yet is merged, one output for each completion, so a reader that is slow costs no more memory than
    its answers themselves. Only the thread of `loop` touches it.
    """

    __slots__ = ("_adding_up", "_error", "_open", "_unread", "_waiter", "loop")

    def __init__(self, requests: Iterable[Request]) -> None:
        self.loop = asyncio.get_running_loop()
        self._open: set[str] = set()
        self._adding_up: set[str] = set()  # requests of which each output says what is new
        for request in requests:
            self._open.add(request.request_id)
            if request.params.output_kind is OutputKind.DELTA:
                self._adding_up.add(request.request_id)
        self._unread: dict[tuple[str, int], RequestOutput] = {}
        self._error: JaxServeError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def open_requests(self) -> frozenset[str]:
        """The ids of requests whose end has not been put here."""
        return frozenset(self._open)

    @property
    def is_done(self) -> bool:
        """Whether every request has ended and everything was read."""
        return not self._open and not self._unread and self._error is None

    def put(self, item: Item) -> None:
        """Takes what the engine says, and wakes the reader."""
        if isinstance(item, JaxServeError):
            self._error = item
            self._open.clear()  # none of them runs, so none may be aborted: another's request can have the same id
        else:
            if item.finished:
                self._open.discard(item.request_id)
            key = item.request_id, item.outputs[0].index if len(item.outputs) == 1 else -1
            unread = self._unread.pop(key, None)  # so that the last output of a request also stands last
            if unread is not None and item.request_id in self._adding_up and key[1] >= 0:
                item = merge_deltas(unread, item)
            self._unread[key] = item
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def get(self) -> RequestOutput:
        """Waits for the next output.

        Raises:
            JaxServeError: what the engine had to say of one of the requests instead.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            await self._waiter
        return self._unread.pop(next(iter(self._unread)))


def merge_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Makes the newer of two successive outputs of one completion say what both say; nobody else may hold them."""
    first, second = older.outputs[0], newer.outputs[0]
    second.text = first.text + second.text
    first.token_ids.extend(second.token_ids)
    second.token_ids = first.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        first.logprobs.extend(second.logprobs)
        second.logprobs = first.logprobs
    return newer
