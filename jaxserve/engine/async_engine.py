"""`AsyncLLM`: the engine for asyncio, running on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from jaxserve.config import EngineConfig
from jaxserve.core.scheduler import SchedulerLimits
from jaxserve.engine import pooled
from jaxserve.engine.build import ReadyEngine, RunningChoice, build_engine
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.engine.health import ONE_TOKEN, wait_for_token
from jaxserve.engine.inbox import OutputInbox
from jaxserve.engine.nodes import end_process
from jaxserve.engine.pooled import PoolingCall
from jaxserve.engine.progress import ShowProgress, choose_announce, choose_progress, hide_progress
from jaxserve.engine.prompt_forms import Message, Prompt
from jaxserve.engine.prompts import RequestFactory
from jaxserve.engine.request_options import (
    ChatArguments,
    EmbedArguments,
    EncodeArguments,
    PoolingArguments,
    RequestArguments,
    RequestOptions,
    ScoreArguments,
    read_arguments,
)
from jaxserve.engine.stats import EngineStats, read_stats
from jaxserve.engine.thread import EngineThread
from jaxserve.engine.view import EngineView
from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ClusterError, EngineStoppedError
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.model_options import DEMO_MODEL
from jaxserve.request import (
    PRIORITIES,
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    Request,
    RequestOutput,
    ScoringOutput,
    ServiceTier,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.vllm_names import refuse_attribute

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.engine.engine import Engine
    from jaxserve.tokenizers import Tokenizer

_LOSS_SECONDS = 1.0  # for readers to be told that another node was lost


class AsyncLLM:
    """Streams generations to any number of coroutines, which queue work for the engine's thread.

    Options and errors are those of `LLM`, but the constructor compiles every program unless `compile="used"`.
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
        """Returns an `AsyncLLM` with the options of an `EngineArgs`, as vLLM's scripts pass them."""
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
        """Returns an `AsyncLLM` with validated options.

        Args:
            progress: shows loading and compiling.
            on_stop: called on the engine's thread when the engine itself fails.
            only_largest: compile only the programs large enough for any step; `compile_rest` compiles the others.
        """
        llm = cls.__new__(cls)
        llm._start(config, progress=progress, on_stop=on_stop, only_largest=only_largest)
        return llm

    def _start(
        self, config: EngineConfig, *, on_stop: Callable[[EngineStoppedError], None] | None = None, **options: Any
    ) -> None:
        """Builds the engine with the `options` of `build_engine` and starts its thread."""
        self._ready = build_engine(config, on_loss=partial(_lose, self), **options)
        self.view = EngineView(self._ready)
        self._thread = EngineThread(self._ready.engine, on_stop)
        self._thread.call(lambda engine: engine.runner.warm_thread()).result()

    if not TYPE_CHECKING:  # a type checker is to miss what is missing
        __getattr__ = refuse_attribute

    def compile_rest(self, progress: ShowProgress) -> None:
        """Compiles the programs that `only_largest` left out, on the caller's thread, while requests are served."""
        for change in self._ready.compile_rest(progress):
            self._thread.call(lambda engine, change=change: change()).result()

    @property
    def ready(self) -> ReadyEngine:
        """The engine's parts. Use those that run steps on the engine's thread only; see `call`."""
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
        """The limits of a step and of the queue."""
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
        """The defaults of requests, from the model's generation_config.json."""
        return self._ready.defaults

    def stats(self) -> EngineStats:
        """Returns the engine's counters. Safe from any thread."""
        return read_stats(self._ready.engine)

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why the engine has stopped; None while it serves."""
        return self._thread.stopped

    def stalled_seconds(self) -> float:
        """Returns the seconds since the engine last finished a step; 0 without work."""
        return self._thread.stalled_seconds()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request's output after each step that added to it (see `OutputKind`).

        A slow reader gets the outputs that it missed merged into one. Leaving the iteration early, or cancelling the
        task, aborts the request. The other arguments are those of `LLM.generate`.

        Raises:
            InvalidRequestError, CapacityError: this request cannot be served; others are not affected.
            QueueFullError: the queue is full.
            EngineStoppedError: the engine has failed or was shut down.
        """
        options = {"request_id": request_id, **read_arguments("AsyncLLM.generate", arguments)}
        async with aclosing(self._run(self._ready.requests.make, prompt, sampling_params, options)) as run:
            async for output in run:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for a conversation, through a chat template; the arguments are those of `LLM.chat`."""
        options = {"request_id": request_id, **read_arguments("AsyncLLM.chat", arguments)}
        async with aclosing(self._run(self._ready.requests.make_chat, messages, sampling_params, options)) as run:
            async for output in run:
                yield output

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], **arguments: Unpack[EmbedArguments]
    ) -> list[EmbeddingOutput]:
        """Returns one embedding per prompt; arguments and errors are those of `LLM.embed`."""
        return await _pool(self, pooled.embed, prompts, read_arguments("AsyncLLM.embed", arguments))

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], **arguments: Unpack[PoolingArguments]
    ) -> list[ClassificationOutput]:
        """Returns the probabilities of classes; arguments and errors are those of `LLM.classify`."""
        return await _pool(self, pooled.classify, prompts, read_arguments("AsyncLLM.classify", arguments))

    async def encode(
        self, prompts: Prompt | Sequence[Prompt], **arguments: Unpack[EncodeArguments]
    ) -> list[PoolingOutput]:
        """Returns plain numbers; arguments and errors are those of `LLM.encode`."""
        return await _pool(self, pooled.encode, prompts, read_arguments("AsyncLLM.encode", arguments))

    async def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], **arguments: Unpack[ScoreArguments]
    ) -> list[ScoringOutput]:
        """Returns scores of pairs; arguments and errors are those of `LLM.score`."""
        given = read_arguments("AsyncLLM.score", arguments)
        options = await asyncio.to_thread(pooled.read_template, given, self.tokenizer)
        return await _pool(self, pooled.score, data_1, data_2, options)

    async def _run(
        self, make: Callable[..., Request], prompt: Any, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput]:
        given = self._ready.default_params if params is None else params
        request = await asyncio.to_thread(make, prompt, given, **options)
        async with aclosing(self.stream([request])) as outputs:
            async for output in outputs:
                yield output

    async def stream(
        self, requests: Sequence[Request], *, beyond_limits: bool = False
    ) -> AsyncGenerator[RequestOutput]:
        """Runs requests made by `requests` together and yields their outputs as they come.

        Args:
            beyond_limits: ignore the limits of the queue.

        Raises:
            JaxServeError: one of them was refused, so none runs; or the engine stopped.
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
        """Returns the parameters that the model's generation_config.json recommends."""
        return self._ready.default_params

    async def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; TokenizerError if there is none."""
        return self._ready.require_tokenizer()

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache between two steps; returns True."""
        await self.call(lambda engine: engine.scheduler.pages.drop_prefix_index())
        return True

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._thread.abort([request_id])

    async def check_health(self, timeout: float = 10.0) -> None:
        """Sends a request of one token and returns once the engine has made a token, for it or any other request.

        An engine that only makes embeddings gets a text of one token, and has to embed it.

        Args:
            timeout: seconds to wait.

        Raises:
            DeadlineError: no token came in time.
            EngineStoppedError, DeviceStepError, NonFiniteLogitsError: the engine, the device or the model failed.
        """
        outputs = self.stream([_make_probe(self)], beyond_limits=True)
        await wait_for_token(outputs, self._ready.engine.counts, timeout)

    async def update_weights(self, tree: Any, *, running: RunningChoice = "requeue") -> None:
        """Swaps the model's weights between two steps; streams continue with the new weights or end with "abort".

        Arguments and errors are those of `LLM.update_weights`.
        """
        await asyncio.wrap_future(self._thread.advance(lambda _: self._ready.update_weights(tree, running)))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Runs a function on the engine's thread between two steps, and returns what it returns."""
        return await asyncio.wrap_future(self._thread.call(function))

    def shutdown(self) -> None:
        """Aborts all requests and stops the thread, and other nodes of the engine. Further calls do nothing."""
        self._thread.shutdown()
        self._ready.close()


async def _pool[T](llm: AsyncLLM, make: Callable[..., PoolingCall[T]], *arguments: Any) -> list[T]:
    """Runs the call that `make` makes, a function of engine/pooled.py, and returns its answers."""
    call = await asyncio.to_thread(make, llm.requests, llm.model, *arguments)
    outputs: dict[str, RequestOutput] = {}
    async with aclosing(llm.stream(call.requests)) as stream:
        async for output in stream:
            outputs[output.request_id] = output
    return call.finish([outputs[request.request_id] for request in call.requests])


def _make_probe(llm: AsyncLLM) -> Request:
    """Returns a request for one token, or where the engine generates none, of one token."""
    # Rows of other tiers do not yield to one of the tier flex.
    options = RequestOptions(priority=PRIORITIES.start, service_tier=ServiceTier.FLEX)
    if llm.model.generates:
        return llm.requests.make([0], ONE_TOKEN, **options)
    return llm.requests.make_embedding([0], **options)


def _lose(llm: AsyncLLM, error: ClusterError) -> None:
    """Ends every request, then the process; the engine may still be in the making."""
    end_process(error, after=_LOSS_SECONDS)
    if hasattr(llm, "_thread"):
        llm._thread.give_up(error)


AsyncLLMEngine = AsyncLLM  # vLLM's older name
