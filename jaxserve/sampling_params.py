"""Sampling parameters: one frozen, validated value per request."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.vllm_names import find_no_object
from jaxserve.vllm_options import SAMPLING_ADVICE

MAX_STOP_STRINGS = 16  # evaluation harnesses send a task's strings plus the text of EOS: four are too few
MAX_STOP_TOKEN_IDS = 256
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_COMPLETIONS = 128  # n
MAX_LOGIT_BIAS = 300
_MAX_PROMPT_LOGPROBS = 20  # where max_logprobs is -1: a prompt's come as a list of fixed length
MAX_BAD_WORD_TOKENS = 8  # in one bad word
MAX_BAD_WORDS = 32  # texts; each becomes two lists of tokens: at the start of a text, and after a space


class OutputKind(Enum):
    """Which `RequestOutput`s a stream yields."""

    CUMULATIVE = "cumulative"  # after every step, everything so far
    DELTA = "delta"  # after every step, what is new
    FINAL_ONLY = "final_only"  # once, when the request has finished


RequestOutputKind = OutputKind  # vLLM's name


def check_truncation(count: int | None) -> None:
    """Raises InvalidRequestError if `truncate_prompt_tokens` is neither None, -1 nor at least 1."""
    if count is None:
        return
    _require_integer("truncate_prompt_tokens", count, low=-1, high=2**31 - 1)
    if count == 0:
        raise InvalidRequestError("must be -1 or at least 1, got 0", field="truncate_prompt_tokens", value=0)


def limit_prompt_logprobs(max_logprobs: int) -> int:
    """Returns the largest `prompt_logprobs` of a request; `max_logprobs` is the engine's limit, -1 for none."""
    return max_logprobs if max_logprobs >= 0 else _MAX_PROMPT_LOGPROBS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's.

    The order is vLLM's too: allowed tokens, bad words, logit bias and min_tokens, penalties, temperature, then min_p,
    then top_k, then top_p over what is left. Log-probabilities are the model's own, before any of these.

    Raises:
        InvalidRequestError: a value is out of range or not finite, or a parameter is not known.
    """

    n: int = 1  # completions of one prompt, each with its own randomness
    presence_penalty: float = 0.0  # in [-2, 2]; subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # in [-2, 2]; subtracted once for each occurrence in the output
    repetition_penalty: float = 1.0  # in [0.01, 2]; divides positive logits of tokens in prompt or output
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # in [0, 1]
    seed: int | None = None  # 64 bits, signed; None or -1: drawn at admission
    max_tokens: int | None = 16  # None: up to max_model_len
    stop: Sequence[str] | str | None = None  # normalised to a tuple
    stop_token_ids: Sequence[int] | None = None  # normalised to a tuple
    ignore_eos: bool = False
    min_tokens: int = 0  # no EOS or stop id before this many, and no stop string within them
    logprobs: int | None = None  # for the chosen token and this many likeliest; -1: for the whole vocabulary
    prompt_logprobs: int | None = None  # the same for each prompt token but the first; never -1
    logit_bias: Mapping[int, float] | None = None  # token id to a bias in [-100, 100]
    allowed_token_ids: Sequence[int] | None = None  # no others are chosen; normalised to a tuple
    bad_words: Sequence[str | Sequence[int]] | None = None  # never in the output; normalised to a tuple
    suppress_tokens: Sequence[int] | None = None  # never chosen (transformers' name); normalised to a tuple
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: Mapping[str, float] | None = None  # arguments of the engine's logits processor
    truncate_prompt_tokens: int | None = None  # keep this many tokens at the prompt's end; -1: as many as fit
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # False: drop the decoder's spaces between shown special tokens
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    best_of: int | None = None  # must equal n: completions are not ranked; normalised to None

    def __new__(cls, *_args: Any, **options: Any) -> SamplingParams:
        """Refuses unknown parameters by name before the generated `__init__` sees them."""
        known = {f.name for f in fields(cls)}
        for name, value in options.items():
            if name in known:
                continue
            if name in SAMPLING_ADVICE:
                raise InvalidRequestError(f"not a sampling parameter here; {SAMPLING_ADVICE[name]}", field=name)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"supported: {', '.join(sorted(known))}"
            raise InvalidRequestError(f"not a supported sampling parameter; {hint}", field=name, value=value)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, low=0.0, high=100.0)
        _require_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _require_number("min_p", self.min_p, low=0.0, high=1.0)
        _require_integer("top_k", self.top_k, low=-1, high=2**31 - 1)
        _require_integer("n", self.n, low=1, high=MAX_COMPLETIONS)
        _require_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _require_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _require_number("repetition_penalty", self.repetition_penalty, low=0.01, high=2.0)
        if self.best_of not in (None, self.n):
            message = f"must be n = {self.n}, got {shorten(self.best_of)}: completions are not ranked"
            raise InvalidRequestError(message, field="best_of", value=self.best_of)
        object.__setattr__(self, "best_of", None)  # else `clone(n=...)` would fail
        if isinstance(self.seed, int) and self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.seed is not None:
            _require_integer("seed", self.seed, low=MIN_SEED, high=MAX_SEED)
        if self.max_tokens is not None:
            _require_integer("max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        _require_integer("min_tokens", self.min_tokens, low=0, high=2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"must be at most max_tokens {self.max_tokens}, got {self.min_tokens}"
            raise InvalidRequestError(message, field="min_tokens", value=self.min_tokens)
        for name, low in (("logprobs", -1), ("prompt_logprobs", 0)):
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name), low=low, high=2**31 - 1)
        check_truncation(self.truncate_prompt_tokens)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError("must be true or false", field=name, value=getattr(self, name))
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise InvalidRequestError(
                "must be StructuredOutputsParams", field="structured_outputs", value=self.structured_outputs
            )
        if not isinstance(self.output_kind, OutputKind):
            raise InvalidRequestError("must be an OutputKind", field="output_kind", value=self.output_kind)
        self._normalise()

    def _normalise(self) -> None:
        object.__setattr__(self, "stop", _normalise_stop(self.stop))
        stop_ids = _normalise_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", stop_ids)
        object.__setattr__(self, "logit_bias", _normalise_logit_bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _normalise_allowed_ids(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _normalise_bad_words(self.bad_words))
        object.__setattr__(self, "suppress_tokens", _normalise_token_ids("suppress_tokens", self.suppress_tokens))
        if self.extra_args is not None:
            object.__setattr__(self, "extra_args", _normalise_extra_args(self.extra_args))
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", field="stop", value=self.stop)

    def clone(self, **changes: Any) -> SamplingParams:
        """Returns a copy with other values for some parameters."""
        return replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0.0

    @property
    def shapes_logits(self) -> bool:
        """Whether a parameter other than temperature and filters changes logits: the row then needs its own state."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.suppress_tokens
            or self.extra_args is not None
        )


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _require_number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or abs(value) == math.inf or (low_open and value == low):
        bracket = "(" if low_open else "["
        message = f"must be a finite number in {bracket}{low:g}, {high:g}], got {shorten(value)}"
        raise InvalidRequestError(message, field=name, value=value)


def _require_integer(name: str, value: object, *, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        message = f"must be an integer in [{low}, {high}], got {shorten(value)}"
        raise InvalidRequestError(message, field=name, value=value)


def _require_list(name: str, items: object, *, of: str, most: int | None = None) -> tuple[Any, ...]:
    """Returns the items as a tuple, empty for None."""
    if items is None:
        return ()
    if not isinstance(items, Collection) or isinstance(items, str | bytes | Mapping):
        raise InvalidRequestError(f"must be a list of {of}, got {shorten(items)}", field=name, value=items)
    if most is not None and len(items) > most:
        raise InvalidRequestError(f"at most {most} {of}, got {len(items)}", field=name, value=items)
    return tuple(items)


def _normalise_stop(stop: object) -> tuple[str, ...]:
    given = (stop,) if isinstance(stop, str) else stop
    strings = _require_list("stop", given, of="strings", most=MAX_STOP_STRINGS)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"must be non-empty strings, got {shorten(string)}", field="stop", value=stop)
    return strings


def _normalise_token_ids(name: str, ids: object, most: int | None = None) -> tuple[int, ...]:
    token_ids = _require_list(name, ids, of="token ids", most=most)
    for token_id in token_ids:
        _require_integer(name, token_id, low=0, high=2**31 - 1)
    return token_ids


def _normalise_logit_bias(bias: object) -> dict[int, float] | None:
    """Returns the biases by integer id; accepts integers as strings too, since JSON has no integer keys."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(f"must map token ids to biases, got {shorten(bias)}", field="logit_bias", value=bias)
    if len(bias) > MAX_LOGIT_BIAS:
        message = f"at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}"
        raise InvalidRequestError(message, field="logit_bias", value=len(bias))
    found = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        _require_integer("logit_bias", token_id, low=0, high=2**31 - 1)
        _require_number("logit_bias", value, low=-100.0, high=100.0)
        found[token_id] = float(value)
    return found


def _normalise_allowed_ids(ids: object) -> tuple[int, ...] | None:
    token_ids = _normalise_token_ids("allowed_token_ids", ids)
    if ids is not None and not token_ids:
        raise InvalidRequestError("must hold at least one token id, got none", field="allowed_token_ids", value=ids)
    return token_ids or None


def _normalise_bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    given = _require_list("bad_words", words, of="texts")
    num_lists = sum(2 if isinstance(word, str) else 1 for word in given)
    if num_lists > 2 * MAX_BAD_WORDS:
        message = f"at most {MAX_BAD_WORDS} texts, or twice as many lists of token ids, got {len(given)}"
        raise InvalidRequestError(message, field="bad_words", value=len(given))
    return tuple(_normalise_bad_word(word) for word in given)


def _normalise_bad_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str) and word.strip():
        return word
    if not word or not isinstance(word, list | tuple):
        message = f"must be texts or lists of token ids that are not empty, got {shorten(word)}"
        raise InvalidRequestError(message, field="bad_words", value=word)
    if len(word) > MAX_BAD_WORD_TOKENS:
        message = f"at most {MAX_BAD_WORD_TOKENS} tokens each, got {len(word)}"
        raise InvalidRequestError(message, field="bad_words", value=word)
    return _normalise_token_ids("bad_words", word)


def _normalise_extra_args(arguments: object) -> dict[str, float]:
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"must map names to numbers, got {shorten(arguments)}", field="extra_args")
    for name, value in arguments.items():
        if not isinstance(name, str):
            raise InvalidRequestError(f"must have names as keys, got {shorten(name)}", field="extra_args", value=name)
        _require_number("extra_args", value, low=-3e38, high=3e38)
    return {name: float(value) for name, value in arguments.items()}


def __getattr__(name: str) -> Any:
    raise find_no_object(__name__, name)
