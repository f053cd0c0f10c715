"""`AsyncLLM`: the same engine behind an event loop, one thread turning it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxserve.config import DEMO_MODEL, EngineConfig
from jaxserve.engine.build import build_engine
from jaxserve.engine.prompts import Message, Prompt
from jaxserve.errors import EngineStoppedError, JaxServeError
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams

_Deliver = Callable[[RequestOutput | JaxServeError], None]


class AsyncLLM:
    """Streams generations to any number of coroutines.

    The engine belongs to one thread, which alone touches it: coroutines leave work in a queue, and outputs come back
    through `call_soon_threadsafe`. Options and errors are those of `LLM`.
    """

    def __init__(
        self,
        model: str = DEMO_MODEL,
        *,
        show_progress: bool = True,
        logits_processor: LogitsProcessor | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(model=str(model), **options)
        self._ready = build_engine(config, show_bars=show_progress, processor=logits_processor)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliver: dict[str, _Deliver] = {}  # the engine thread's
        self._stopped: EngineStoppedError | None = None
        self._thread = threading.Thread(target=self._turn, name="jaxserve-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields what the request has produced, after each step that brought something (see `OutputKind`).

        Leaving the iteration early, or cancelling the task, aborts the request.

        Raises:
            InvalidRequestError, CapacityError: this request cannot be served; others are not affected.
            EngineStoppedError: the engine itself has failed.
        """
        params = sampling_params or self._ready.default_params
        request = await asyncio.to_thread(self._ready.requests.make, prompt, params, request_id=request_id)
        async for output in self._stream(request):
            yield output

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for a conversation, through the tokenizer's own chat template."""
        params = sampling_params or self._ready.default_params
        request = await asyncio.to_thread(self._ready.requests.make_chat, messages, params, request_id=request_id)
        async for output in self._stream(request):
            yield output

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's generation_config.json recommends."""
        return self._ready.default_params

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._inbox.put(lambda: self._abort(request_id))

    def shutdown(self) -> None:
        """Aborts what is running and stops the thread. Calling it again does nothing."""
        self._inbox.put(None)
        self._thread.join()

    async def _stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | JaxServeError] = asyncio.Queue()

        def deliver(item: RequestOutput | JaxServeError) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, item)

        self._inbox.put(lambda: self._add(request, deliver))
        finished = False
        try:
            while not finished:
                item = await outputs.get()
                if isinstance(item, JaxServeError):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._inbox.put(lambda: self._abort(request.request_id))

    # Everything below runs on the engine's thread.

    def _turn(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._stop_serving(error)

    def _serve(self) -> None:
        engine = self._ready.engine
        while True:
            try:
                job = self._inbox.get(block=not engine.has_unfinished)
            except queue.Empty:
                self._hand_out(engine.step())
                continue
            if job is None:
                break
            job()
        for request_id in list(self._deliver):
            self._abort(request_id)
        engine.drain()

    def _stop_serving(self, error: Exception) -> None:
        """Tells whoever waits, and whoever still comes: nobody hangs because of a fault of ours."""
        self._stopped = EngineStoppedError(f"the engine stopped: {error!r}")
        self._stopped.__cause__ = error
        for deliver in self._deliver.values():
            deliver(self._stopped)
        self._deliver.clear()
        while (job := self._inbox.get()) is not None:
            job()

    def _add(self, request: Request, deliver: _Deliver) -> None:
        if self._stopped is not None:
            deliver(self._stopped)
            return
        try:
            self._ready.engine.add_request(request)
        except JaxServeError as error:
            deliver(error)
        else:
            self._deliver[request.request_id] = deliver

    def _abort(self, request_id: str) -> None:
        output = self._ready.engine.abort_request(request_id) if self._stopped is None else None
        if output is not None:
            self._hand_out([output])

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            deliver = self._deliver.pop(output.request_id) if output.finished else self._deliver[output.request_id]
            try:
                deliver(output)
            except RuntimeError:  # the reader's event loop is closed: nobody is left to read
                if not output.finished:
                    del self._deliver[output.request_id]
                    self._ready.engine.abort_request(output.request_id)
