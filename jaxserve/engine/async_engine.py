"""`AsyncLLM`: the same engine behind an event loop, one thread turning it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from jaxserve.config import DEMO_MODEL, EngineConfig
from jaxserve.engine.arguments import find_deadline, read_chat_options
from jaxserve.engine.build import ReadyEngine, RunningChoice, build_engine
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.engine.health import ONE_TOKEN, wait_for_token
from jaxserve.engine.inbox import OutputInbox
from jaxserve.engine.progress import ShowProgress, choose_announce, choose_progress, hide_progress
from jaxserve.engine.prompts import Message, Prompt, RequestFactory
from jaxserve.engine.stats import EngineStats, read_stats
from jaxserve.engine.thread import EngineThread
from jaxserve.engine.view import EngineView
from jaxserve.engine_args import EngineArgs
from jaxserve.errors import EngineStoppedError
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.request import PRIORITIES, Request, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import SchedulerLimits

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.models.base import DecoderConfig
    from jaxserve.tokenizers import Tokenizer


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
        config = EngineConfig.from_options(model=str(model), **options).with_compile("all")
        self._start(
            config,
            progress=choose_progress(show_progress),
            processor=logits_processor,
            announce=choose_announce(show_progress),
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, show_progress: bool = True) -> AsyncLLM:
        """Builds one from options that are one value, as vLLM's scripts have them."""
        return cls(**engine_args.options, show_progress=show_progress)

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
        announce: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._ready = build_engine(
            config, progress=progress, processor=processor, only_largest=only_largest, announce=announce
        )
        self.view = EngineView(self._ready)
        self._thread = EngineThread(self._ready.engine, on_stop)
        self._thread.call(lambda engine: self._ready.runner.warm_thread()).result()

    def compile_rest(self, progress: ShowProgress) -> None:
        """Compiles what a start with `only_largest` left, on the caller's thread, while requests are answered."""
        for change in self._ready.compile_rest(progress):
            self._thread.call(lambda engine, change=change: change()).result()

    @property
    def ready(self) -> ReadyEngine:
        """The parts the engine is made of. Whatever runs steps belongs to the engine's thread: see `call`."""
        return self._ready

    @property
    def model(self) -> DecoderConfig:
        """The model's configuration."""
        return self._ready.shapes.model

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        return self.limits.max_model_len

    @property
    def limits(self) -> SchedulerLimits:
        """The bounds of a step and of the queue."""
        return self._ready.engine.scheduler.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when there is none."""
        return self._ready.tokenizer

    @property
    def requests(self) -> RequestFactory:
        """Makes the requests that `stream` takes. Safe from any thread."""
        return self._ready.requests

    @property
    def defaults(self) -> GenerationDefaults:
        """What requests inherit from the model's generation_config.json."""
        return self._ready.defaults

    def stats(self) -> EngineStats:
        """Returns the engine's counters. Safe from any thread."""
        return read_stats(self._ready.engine)

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why the engine serves nobody any more; None while it does."""
        return self._thread.stopped

    def stalled_seconds(self) -> float:
        """How long the engine has been at its present step; 0 without work."""
        return self._thread.stalled_seconds()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields what the request has produced, after each step that brought something (see `OutputKind`).

        A reader that falls behind gets what it missed in one output. Leaving the iteration early, or cancelling the
        task, aborts the request. `priority`, `cache_salt` and `timeout` are those of `LLM.generate`.

        Raises:
            InvalidRequestError, CapacityError: this request cannot be served; others are not affected.
            EngineStoppedError: the engine itself has failed.
        """
        options = {"cache_salt": cache_salt, "priority": priority, "deadline": find_deadline(timeout)}
        async with aclosing(self._run(self._ready.requests.make, prompt, sampling_params, request_id, options)) as run:
            async for output in run:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for a conversation, through a chat template; the arguments are those of `LLM.chat`."""
        options = read_chat_options(
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        options |= {"cache_salt": cache_salt, "priority": priority, "deadline": find_deadline(timeout)}
        make = self._ready.requests.make_chat
        async with aclosing(self._run(make, messages, sampling_params, request_id, options)) as run:
            async for output in run:
                yield output

    async def _run(
        self,
        make: Callable[..., Request],
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput]:
        params = self._ready.default_params if sampling_params is None else sampling_params
        request = await asyncio.to_thread(make, prompt, params, request_id=request_id, **options)
        async with aclosing(self.stream([request])) as outputs:
            async for output in outputs:
                yield output

    async def stream(
        self, requests: Sequence[Request], *, beyond_limits: bool = False
    ) -> AsyncGenerator[RequestOutput]:
        """Runs requests of `ready.requests` together and yields their outputs as they come.

        Args:
            beyond_limits: they come in however much waits.

        Raises:
            JaxServeError: one of them cannot be served, so none of them is.
        """
        inbox = OutputInbox(requests)
        self._thread.submit(requests, inbox, beyond_limits=beyond_limits)
        try:
            while not inbox.is_done:
                yield await inbox.get()
        finally:
            if left := inbox.open_requests:
                self._thread.leave(list(left), inbox)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's generation_config.json recommends."""
        return self._ready.default_params

    async def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; TokenizerError when there is none."""
        return self._ready.require_tokenizer()

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes between two steps; True: done."""
        await self.call(lambda engine: engine.scheduler.pages.drop_prefix_index())
        return True

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._thread.abort([request_id])

    async def check_health(self, timeout: float = 10.0) -> None:
        """Returns when the engine has made a token, of a request of this call or, if no row is free, of anybody's.

        Args:
            timeout: seconds for it to come.

        Raises:
            DeadlineError: none came in time.
            EngineStoppedError, DeviceStepError, NonFiniteLogitsError: none will come, or none that is right.
        """
        request = self._ready.requests.make([0], ONE_TOKEN, priority=PRIORITIES.start)
        outputs = self.stream([request], beyond_limits=True)
        await wait_for_token(outputs, self._ready.engine.counts, timeout)

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


AsyncLLMEngine = AsyncLLM  # vLLM's older name
