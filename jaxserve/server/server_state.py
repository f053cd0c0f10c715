"""The state that all routes of a server share: its phase, its engine, its counters."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fastapi import FastAPI, Request

from jaxserve import __version__
from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.engine.progress import ProgressLines, Report, say_progress
from jaxserve.errors import ConfigError, InvalidRequestError, QueueFullError
from jaxserve.request import Rank, ServiceTier
from jaxserve.server.adapters import ServedAdapters
from jaxserve.server.budget import FREE_BYTES, ByteBudget
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.grammar_lane import GrammarLane
from jaxserve.server.images import ServedImages
from jaxserve.server.keys import KeyRights
from jaxserve.server.logprobs import TokenTexts
from jaxserve.server.lora_modules import read_lora_modules
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.options import ServerConfig
from jaxserve.server.preparation import Preparation
from jaxserve.server.request_context import get_context
from jaxserve.server.single_flight import SingleFlight
from jaxserve.server.tools import guess_reasoning_parser, guess_tool_parser
from jaxserve.server.tracing import NullTracer, Tracer
from jaxserve.tokenizers import Tokenizer

_log = logging.getLogger(__name__)
_LONGEST_RETRY = 60  # seconds
_LIVE_SECONDS, _PROBE_SECONDS = 0.25, 1.0  # lifetime of a shared picture of the engine, and of a probe's result
_MOST_VIEWERS = 64
_MOST_NAMES = 10  # of models, in an error
_SEQUENCES_PER_ROW = 4  # one request may have at most so many


class Phase(StrEnum):
    STARTING = "starting"  # loading weights
    WARMING = "warming"  # compiling programs
    READY = "ready"
    DRAINING = "draining"  # finishes running requests, accepts no new ones
    FAILED = "failed"  # the engine failed; the process ends


@dataclass(slots=True)
class Progress:
    """How far startup has come."""

    title: str = ""
    done: float = 0
    total: float = 1
    note: str = ""


@dataclass(slots=True)
class ServerState:
    """One per server. The event loop writes it; other threads write `phase`, `progress` and what `open` sets."""

    config: ServerConfig
    engine_config: EngineConfig
    metrics: ServerMetrics
    tracer: Tracer = field(default_factory=NullTracer)
    phase: Phase = Phase.STARTING
    progress: Progress = field(default_factory=Progress)
    llm: AsyncLLM | None = None
    chat_template: str | None = None  # replaces the tokenizer's own
    tool_parser: str | None = None  # reads tool calls under tool_choice "auto"; None: not available
    reasoning_parser: str | None = None  # reads what the model thinks apart from its answer
    token_texts: TokenTexts = field(default_factory=lambda: TokenTexts(None))
    template_variables: dict[str, Any] = field(default_factory=dict)  # defaults for requests that leave them out
    created: int = field(default_factory=lambda: int(time.time()))
    max_sequences: int = field(init=False)  # per request; `open` lowers it to what the rows allow
    num_streams: int = 0  # requests being answered
    num_viewers: int = 0  # clients of the live view
    live: SingleFlight[bytes] = field(default_factory=lambda: SingleFlight(_LIVE_SECONDS))
    probe: SingleFlight[str | None] = field(default_factory=lambda: SingleFlight(_PROBE_SECONDS))
    has_drained: bool = False  # the last request has ended and the process is exiting; live views stop
    bodies: ByteBudget = field(init=False)  # bytes of bodies being read and prepared
    images: ServedImages | None = None  # of a model that reads images
    omitted_tools: set[str] = field(default_factory=set)  # types of hosted tools that the log has named
    fingerprint: str = ""  # `system_fingerprint` of answers: version and engine options
    preparation: Preparation = field(init=False)
    adapters: ServedAdapters = field(init=False)
    grammars: GrammarLane = field(init=False)

    def __post_init__(self) -> None:
        self.config.refuse_adapters(enable_lora=self.engine_config.lora.enable_lora)
        self.adapters = ServedAdapters(self.base_names, self.config.serving.lora_dir)
        self.max_sequences = self.config.limits.max_sequences_per_request
        digest = hashlib.sha256(repr(self.engine_config).encode()).hexdigest()
        most = self.config.limits.max_body_bytes_total
        self.bodies = ByteBudget(most, "Request bodies", code="too_many_body_bytes", free=FREE_BYTES)
        self.preparation = Preparation(self.config.limits.template_timeout)
        self.grammars = GrammarLane(self.config.limits.max_grammar_time)
        self.fingerprint = f"jaxserve-{__version__}-{digest[:8]}"

    @property
    def base_names(self) -> tuple[str, ...]:
        """The names under which clients know the model; answers carry the first if a request has none."""
        return self.config.serving.served_model_name or (self.engine_config.model.model,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, then of its adapters."""
        return *self.base_names, *self.adapters.names

    @property
    def serves(self) -> bool:
        """Whether requests are accepted."""
        return self.llm is not None and self.phase in (Phase.READY, Phase.WARMING)

    @property
    def is_stuck(self) -> bool:
        """Whether there is work, and no step has ended within the watchdog's timeout."""
        return self.llm is not None and self.llm.stalled_seconds() > self.config.serving.watchdog_timeout

    @property
    def is_preparing(self) -> bool:
        """Whether a thread works on a request; Python's normal exit would wait for it."""
        return self.preparation.is_busy or self.grammars.is_busy

    @property
    def engine(self) -> AsyncLLM:
        """The engine; ApiError 503 while it accepts no requests."""
        if self.llm is None or not self.serves:
            raise not_serving(self.phase)
        return self.llm

    def open(self, llm: AsyncLLM) -> None:
        """Starts serving.

        Raises:
            WorkerStartError: the process for chat templates cannot be started.
            ConfigError: the model's chat template does not read one of the default variables.
        """
        tokenizer, serving = llm.tokenizer, self.config.serving
        template = self.chat_template or (tokenizer.chat_template if tokenizer is not None else None)
        self.tool_parser = _choose_parser(serving.tool_call_parser, guess_tool_parser(template))
        self.reasoning_parser = _choose_parser(serving.reasoning_parser, guess_reasoning_parser(template))
        _log.info("format of calls: %s; of reasoning: %s", self.tool_parser or "none", self.reasoning_parser or "none")
        if template is not None:
            self._check_defaults(template, tokenizer)
            self.preparation.start(template)
            self._log_form(template, tokenizer)
        if llm.requests.images is not None:
            most = self.config.limits.max_image_bytes_total
            self.images = ServedImages(llm.requests.images, ByteBudget(most, "Images", code="too_many_image_bytes"))
            self.metrics.images = self.images.counts
        self.adapters.open(llm.ready.adapters, read_lora_modules(serving.lora_modules))
        self.token_texts = TokenTexts(tokenizer)
        self.metrics.cache_config, self.metrics.adapters = llm.view.describe_cache(), llm.ready.adapters
        self.max_sequences = min(self.max_sequences, _SEQUENCES_PER_ROW * llm.limits.max_num_seqs)
        self.llm, self.phase = llm, Phase.WARMING

    def _check_defaults(self, template: str, tokenizer: Tokenizer | None) -> None:
        from jaxserve.tokenizers.chat import check_variables
        from jaxserve.tokenizers.template import require_read

        try:
            names = list(check_variables(self.template_variables, tokenizer.named_tokens if tokenizer else {}))
            require_read(template, names)
        except InvalidRequestError as error:
            name = error.field.rpartition(".")[2]
            message = f"{name}: {str(error).removeprefix(f'{error.field}: ')}"
            raise ConfigError(message, field="default_chat_template_kwargs", value=name) from error

    def _log_form(self, template: str, tokenizer: Tokenizer | None) -> None:
        """Logs what the template does not show as it comes."""
        from jaxserve.tokenizers.adaptation import describe_form
        from jaxserve.tokenizers.chat import make_form
        from jaxserve.tokenizers.renderer import RenderTimeoutError

        named_tokens = tokenizer.named_tokens if tokenizer else {}
        with suppress(RenderTimeoutError):  # requests ask again
            for line in describe_form(make_form(template, named_tokens, self.preparation.choose_renderer())):
                _log.info("chat template: %s", line)

    def end_processes(self) -> None:
        """Ends the processes that render templates and decode images. Work that needs one is answered by 503."""
        self.preparation.close()
        if self.images is not None:
            self.images.close()

    def finish_warming(self) -> None:
        """Enters the ready phase once every program is compiled; a server that is already draining stays so."""
        if self.phase is Phase.WARMING:
            self.phase = Phase.READY

    def check_model(self, http: Request, name: str | None) -> str:
        """Returns the name, for the answer, of the model that a request names.

        Raises:
            ApiError: 404; there is no such model. 403; it is an adapter that the key may not use.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.base_names[:_MOST_NAMES])  # not all adapters are everybody's
            message = f"The model {name[:100]!r} does not exist here; there is {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        if self.adapters.get(name) is not None:
            get_context(http.scope).rights.require_adapter(name)
        return name

    def refuse_if_full(self, rights: KeyRights, rank: Rank | None = None) -> None:
        """Refuses a request early that could only be refused later; ApiError 429 or 503.

        Args:
            rank: None while it is unknown; the best that the key may have is assumed.
        """
        assumed = rights.find_best_rank(self.config.limits.max_priority) if rank is None else rank
        has_limit = rank is not None or ServiceTier.FLEX not in rights.tiers  # else it may turn out to be of that tier
        try:
            self.engine.view.refuse_if_full(assumed, rights.tenant, checks_wait=has_limit)
        except QueueFullError as error:
            self.metrics.count("queue_full")
            raise to_api_error(error, self.retry_after()) from error

    @contextmanager
    def count_stream(self) -> Iterator[None]:
        """Counts a request while it is being answered; ApiError 429 beyond the limit."""
        if self.num_streams >= self.config.limits.max_streams:
            self.metrics.count("queue_full")
            message = f"The server is already answering {self.num_streams} requests, its limit; try again."
            raise ApiError(429, message, code="too_many_streams", headers={"Retry-After": str(self.retry_after())})
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    @contextmanager
    def count_viewer(self) -> Iterator[None]:
        """Counts a client of the live view; ApiError 429 beyond the limit."""
        if self.num_viewers >= _MOST_VIEWERS:
            message = f"The live view has {self.num_viewers} viewers already, its limit; try again later."
            headers = {"Retry-After": str(_LONGEST_RETRY)}
            raise ApiError(429, message, code="too_many_viewers", headers=headers)
        self.num_viewers += 1
        try:
            yield
        finally:
            self.num_viewers -= 1

    def retry_after(self) -> int:
        """Returns the Retry-After of a refusal in seconds: the time until everything that waits now has started."""
        seconds = 0.0 if self.llm is None else self.llm.view.seconds_to_admit()
        return max(1, math.ceil(min(_LONGEST_RETRY, seconds)))

    @contextmanager
    def show_progress(self, title: str, *, unit: str = "") -> Iterator[Report]:
        """Records the progress of startup for /health, and logs it."""
        self.progress = Progress(title)
        if title.endswith("programs"):
            self.phase = Phase.WARMING
        with say_progress(ProgressLines(title, unit), _log.info) as log:

            def report(done: float, total: float, note: str = "", *, loaded: float = 0) -> None:
                self.progress = Progress(title, done, total, note)
                log(done, total, note, loaded=loaded)

            yield report


class ServerApp(FastAPI):
    """A FastAPI application whose routes share the state of one server."""

    def __init__(self, state: ServerState, **options: Any) -> None:
        super().__init__(**options)
        self.server_state = state


def get_state(http: Request) -> ServerState:
    """Returns the state of the server that a route belongs to."""
    app: ServerApp = http.app
    return app.server_state


def not_serving(phase: Phase) -> ApiError:
    """Returns the 503 of a server in this phase."""
    reason = {
        Phase.DRAINING: "The server is shutting down.",
        Phase.FAILED: "The engine has failed; the server is shutting down.",
    }.get(phase, f"The server is {phase}; GET /health says how far it is.")
    return ApiError(503, reason, code=f"server_{phase}", headers={"Retry-After": "5"})


def _choose_parser(option: str, detected: str | None) -> str | None:
    return detected if option == "auto" else None if option == "none" else option
