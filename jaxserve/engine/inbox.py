"""The unread outputs of requests, between the engine's thread and the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from jaxserve.errors import JaxServeError
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import OutputKind

Item = RequestOutput | JaxServeError


class OutputInbox:
    """The unread outputs of requests that one coroutine reads together.

    Unread outputs are merged into one per completion, so a slow reader costs no more memory than its answers. Only the
    thread of `loop` may use it.
    """

    __slots__ = ("_adding_up", "_error", "_open", "_unread", "_waiter", "loop")

    def __init__(self, requests: Iterable[Request]) -> None:
        self.loop = asyncio.get_running_loop()
        self._open: set[str] = set()
        self._adding_up: set[str] = set()  # requests with OutputKind.DELTA
        for request in requests:
            self._open.add(request.request_id)
            if request.params.output_kind is OutputKind.DELTA:
                self._adding_up.add(request.request_id)
        self._unread: dict[tuple[str, int], RequestOutput] = {}
        self._error: JaxServeError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def open_requests(self) -> frozenset[str]:
        """The ids of requests without a final output or error so far."""
        return frozenset(self._open)

    @property
    def is_done(self) -> bool:
        """Whether every request has ended and every output was read."""
        return not self._open and not self._unread and self._error is None

    def put(self, item: Item) -> None:
        """Adds an output, or the error that replaces all further ones, and wakes the reader."""
        if isinstance(item, JaxServeError):
            self._error = item
            self._open.clear()  # none of them runs; an abort could hit another caller's request with the same id
        else:
            if item.finished:
                self._open.discard(item.request_id)
            key = item.request_id, item.outputs[0].index if len(item.outputs) == 1 else -1
            unread = self._unread.pop(key, None)  # reinserted below, so a request's last output stays last
            if unread is not None and item.request_id in self._adding_up and key[1] >= 0:
                item = merge_deltas(unread, item)
            self._unread[key] = item
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def get(self) -> RequestOutput:
        """Waits for the next output and returns it.

        Raises:
            JaxServeError: the engine refused the requests or stopped.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            await self._waiter
        return self._unread.pop(next(iter(self._unread)))


def merge_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Merges two successive DELTA outputs of one completion; changes both and returns the newer one."""
    first, second = older.outputs[0], newer.outputs[0]
    second.text = first.text + second.text
    first.token_ids.extend(second.token_ids)
    second.token_ids = first.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        first.logprobs.extend(second.logprobs)
        second.logprobs = first.logprobs
    return newer
