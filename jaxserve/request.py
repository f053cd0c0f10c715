"""Requests, which go into the engine, and their outputs: plain values, no arrays."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NotRequired, Self, TypedDict

from jaxserve.errors import JaxServeError
from jaxserve.media.items import PromptImages
from jaxserve.sampling_params import SamplingParams
from jaxserve.token_automaton import TokenAutomaton

PRIORITIES = range(-(2**31), 2**31)
_NO_PARAMS = SamplingParams()
TOKEN_TYPE = 2**30
"""Added to the id of a token of type 1, of the second text of a pair, for models that tell the two apart."""
FIRST_IMAGE_ROW = -2
"""The id that a program gets for a placeholder of row 0 of the images on the device; that of row r is r less."""
Rank = tuple[int, int]  # (service tier, priority); the smaller is served first


class FinishReason(Enum):
    """Why a sequence ended; with `error` and `timeout` the output carries a typed error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"

    def __str__(self) -> str:
        return self.value


class ServiceTier(IntEnum):
    """How soon a request is served (OpenAI's names); a better tier is a smaller number."""

    PRIORITY = 0  # its rows decode within `priority_itl_ms` a step
    DEFAULT = 1
    FLEX = 2  # runs on what the others leave, and yields its row to them

    def __str__(self) -> str:
        return self.name.lower()


SERVICE_TIERS = {"auto": ServiceTier.DEFAULT, **{str(tier): tier for tier in ServiceTier}}  # by OpenAI's names


class Task(Enum):
    """What a request asks of the model."""

    GENERATE = "generate"  # an answer to its prompt
    READ = "read"  # its prompt alone, perhaps with log-probabilities
    POOL = "pool"  # the prompt's embedding


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is. Tenants share the engine by weight with `scheduling_policy="fair"`."""

    name: str = ""
    weight: float = 1.0  # of its share while others wait, too; positive
    queue_share: float = 1.0  # the most of the queue that its requests may fill, in (0, 1]


DEFAULT_TENANT = Tenant()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """One load of a LoRA adapter. Files that are read again are another one, whatever its name.

    Whoever holds it keeps its copy on the host.
    """

    name: str
    generation: int  # the number of the load, from 1 on
    copy: Any = field(default=None, repr=False)  # what a slot on the device gets


class TextPrompt(TypedDict):
    """A prompt as text (vLLM's name)."""

    prompt: str  # with images, one mark of the model's where each belongs
    cache_salt: NotRequired[str]  # shares cached prefixes with prompts of the same salt only
    multi_modal_data: NotRequired[dict[str, Any]]  # under "image": an image of Pillow, or a list of them
    mm_processor_kwargs: NotRequired[dict[str, Any]]  # options of the image processor


class TokensPrompt(TypedDict):
    """A prompt as token ids (vLLM's name)."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # their text, only shown in the output
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]  # each image belongs to one placeholder among the ids
    mm_processor_kwargs: NotRequired[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request, validated and tokenized."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = _NO_PARAMS  # of the tasks GENERATE and READ
    prompt: str | None = None  # None when the user gave token ids
    eos_token_ids: tuple[int, ...] = ()  # empty with ignore_eos
    seed: int = 0  # 64 bits; the user's, or drawn at admission and kept through preemption and replay
    bad_words: tuple[tuple[int, ...], ...] = ()  # `params.bad_words` as token ids
    grammar: Any = None  # compiled from `params.structured_outputs`
    automaton: TokenAutomaton | None = None  # the grammar's, where the device follows it without masks
    cache_salt: str = ""  # requests share prefix pages only with requests of the same salt
    arrival_time: float = field(default_factory=time.monotonic)
    priority: int = 0  # smaller ones run first within a tier (as in vLLM); in PRIORITIES
    service_tier: ServiceTier = ServiceTier.DEFAULT
    tenant: Tenant = DEFAULT_TENANT
    task: Task = Task.GENERATE  # others end with the prompt, whatever `params.max_tokens` says
    deadline: float | None = None  # monotonic seconds at which the request ends with what it has
    adapter: Adapter | None = None
    images: PromptImages | None = None  # whose placeholders are among the prompt's ids

    @property
    def generation(self) -> int:
        """That of its adapter; 0 without one."""
        return 0 if self.adapter is None else self.adapter.generation

    @property
    def salt(self) -> str:
        """What requests must have in common to share prefixes: adapter and `cache_salt`; no salt spells an adapter."""
        return f"{self.generation}:{self.cache_salt}"

    @property
    def rank(self) -> Rank:
        return self.service_tier, self.priority

    @property
    def needs_room(self) -> bool:
        """Whether the context must have room for a token of an answer. What is asked of a prompt needs none."""
        return self.task is Task.GENERATE and self.params.prompt_logprobs is None


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token under the model's own logits, before any parameter changes them (vLLM's names)."""

    logprob: float
    rank: int | None = None  # 1: the likeliest
    decoded_token: str | None = None  # None without a tokenizer


TokenLogprobs = dict[int, Logprob]  # at one position, by token id: the chosen token and the likeliest ones


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request, finished or so far (vLLM's names)."""

    index: int
    text: str  # cumulative, or what is new with OutputKind.DELTA; empty with detokenize=False
    token_ids: list[int]
    finish_reason: str | None = None  # stop, length, abort, error, timeout; None: not finished
    stop_reason: int | str | None = None  # the stop token id or stop string that matched; None for EOS
    cumulative_logprob: float | None = None  # sum over all tokens so far; None unless logprobs were asked for
    logprobs: list[TokenLogprobs] | None = None  # one per token in `token_ids`


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Monotonic times in seconds, None: not reached yet; and counts of the sequence that ended last."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # drafts that steps verified
    num_accepted_tokens: int = 0  # those among them that were right
    verified: tuple[tuple[int, int], ...] = ()  # (drafts, accepted) of each step with drafts


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced (vLLM's names)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    metrics: RequestMetrics | None = None
    error: JaxServeError | None = None  # set when finish_reason is "error" or "timeout"
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per prompt token, None for the first
    embedding: Any = None  # the prompt's, list[float], if it was asked for; or numpy float32 [n, E] of its n tokens


@dataclass(frozen=True, slots=True)
class _PooledOutput:
    """What a model makes of a text, or of a pair of texts (vLLM's names)."""

    request_id: str
    prompt: str | None  # None for a pair
    prompt_token_ids: list[int]

    @property
    def outputs(self) -> Self:
        """Itself: vLLM's scripts read `output.outputs.embedding`."""
        return self


@dataclass(frozen=True, slots=True)
class EmbeddingOutput(_PooledOutput):
    """The embedding of a prompt."""

    embedding: list[float]  # of Euclidean norm 1, unless the model's files say otherwise
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache


@dataclass(frozen=True, slots=True)
class ClassificationOutput(_PooledOutput):
    """The classes of a prompt."""

    probs: list[float]  # of each class; with use_activation=False what the head gives
    num_cached_tokens: int = 0

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput(_PooledOutput):
    """How well two texts belong together."""

    score: float  # a probability only where the model's activation makes it one
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolingOutput(_PooledOutput):
    """What `LLM.encode` returns: an embedding, the numbers of classes, or a vector of each token."""

    data: list[float] | list[list[float]]
    num_cached_tokens: int = 0
