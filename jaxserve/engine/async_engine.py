"""`AsyncLLM`: the same engine behind an event loop, one thread turning it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from jaxserve.config import DEMO_MODEL, EngineConfig
from jaxserve.engine.build import ReadyEngine, RunningChoice, build_engine
from jaxserve.engine.inbox import OutputInbox
from jaxserve.engine.progress import ShowProgress, choose_progress, hide_progress
from jaxserve.engine.prompts import Message, Prompt
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import EngineStoppedError
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


class AsyncLLM:
    """Streams generations to any number of coroutines.

    The engine belongs to one thread, which alone touches it: coroutines leave work in a queue, and outputs come back
    to their event loop. Options and errors are those of `LLM`.
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
        self._start(config, progress=choose_progress(show_progress), processor=logits_processor)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        progress: ShowProgress = hide_progress,
        on_stop: Callable[[EngineStoppedError], None] | None = None,
        only_largest: bool = False,
    ) -> AsyncLLM:
        """Builds one from validated options.

        Args:
            progress: told how far loading and compiling are.
            on_stop: called on the engine's thread when it met a fault of its own.
            only_largest: compile just the programs that hold any step; `compile_rest` does the others.
        """
        llm = cls.__new__(cls)
        llm._start(config, progress=progress, on_stop=on_stop, only_largest=only_largest)
        return llm

    def _start(
        self,
        config: EngineConfig,
        *,
        progress: ShowProgress,
        processor: LogitsProcessor | None = None,
        on_stop: Callable[[EngineStoppedError], None] | None = None,
        only_largest: bool = False,
    ) -> None:
        self._ready = build_engine(config, progress=progress, processor=processor, only_largest=only_largest)
        self._thread = EngineThread(self._ready.engine, on_stop)

    def compile_rest(self, progress: ShowProgress) -> None:
        """Compiles what a start with `only_largest` left, on the caller's thread, while requests are answered."""
        for change in self._ready.compile_rest(progress):
            self._thread.call(lambda engine, change=change: change()).result()

    @property
    def ready(self) -> ReadyEngine:
        """The parts the engine is made of. Whatever runs steps belongs to the engine's thread: see `call`."""
        return self._ready

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why the engine serves nobody any more; None while it does."""
        return self._thread.stopped

    def stalled_seconds(self) -> float:
        """How long the engine has been at its present step; 0 without work."""
        return self._thread.stalled_seconds()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields what the request has produced, after each step that brought something (see `OutputKind`).

        A reader that falls behind gets what it missed in one output. Leaving the iteration early, or cancelling the
        task, aborts the request.

        Raises:
            InvalidRequestError, CapacityError: this request cannot be served; others are not affected.
            EngineStoppedError: the engine itself has failed.
        """
        params = sampling_params or self._ready.default_params
        request = await asyncio.to_thread(self._ready.requests.make, prompt, params, request_id=request_id)
        async with aclosing(self.stream([request])) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for a conversation, through the tokenizer's own chat template."""
        params = sampling_params or self._ready.default_params
        request = await asyncio.to_thread(self._ready.requests.make_chat, messages, params, request_id=request_id)
        async with aclosing(self.stream([request])) as outputs:
            async for output in outputs:
                yield output

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[RequestOutput]:
        """Runs requests of `ready.requests` together and yields their outputs as they come.

        Raises:
            JaxServeError: one of them cannot be served, so none of them is.
        """
        inbox = OutputInbox(requests)
        self._thread.submit(requests, inbox)
        try:
            while not inbox.is_done:
                yield await inbox.get()
        finally:
            if left := inbox.open_requests:
                self._thread.leave(list(left), inbox)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's generation_config.json recommends."""
        return self._ready.default_params

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._thread.abort([request_id])

    async def update_weights(self, tree: Any, *, running: RunningChoice = "requeue") -> None:
        """Swaps the model's weights between two steps; streams go on with the new ones, or end with "abort".

        Arguments and errors are those of `LLM.update_weights`.
        """
        await asyncio.wrap_future(self._thread.advance(lambda _: self._ready.update_weights(tree, running)))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Runs a function on the engine's thread between two steps, and returns what it returns."""
        return await asyncio.wrap_future(self._thread.call(function))

    def shutdown(self) -> None:
        """Aborts what is running and stops the thread. Calling it again does nothing."""
        self._thread.shutdown()
