"""What a user may ask of the sampler: one frozen, validated value per request."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten

MAX_STOP_STRINGS = 16  # evaluation harnesses send a task's strings plus the text of EOS: four are too few
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**63 - 1


class OutputKind(Enum):
    """Which `RequestOutput`s a stream yields."""

    CUMULATIVE = "cumulative"  # after every step, everything so far
    DELTA = "delta"  # after every step, what is new
    FINAL_ONLY = "final_only"  # once, when the request has finished


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's.

    The order of the filters is vLLM's too: temperature, then min_p, then top_k, then top_p over what is left.

    Raises:
        InvalidRequestError: a value is out of range or not finite, or a parameter is not known.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # in [0, 1]
    seed: int | None = None  # None: drawn when the request is admitted, and kept with it
    max_tokens: int | None = 16  # None: up to max_model_len
    stop: Sequence[str] | str | None = None  # normalised to a tuple
    stop_token_ids: Sequence[int] | None = None  # normalised to a tuple
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __new__(cls, *_args: Any, **options: Any) -> SamplingParams:
        """Refuses unknown parameters by name before the generated `__init__` sees them."""
        known = {f.name for f in fields(cls)}
        for name, value in options.items():
            if name in known:
                continue
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"supported: {', '.join(sorted(known))}"
            raise InvalidRequestError(f"not a supported sampling parameter; {hint}", field=name, value=value)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, low=0.0, high=100.0)
        _require_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _require_number("min_p", self.min_p, low=0.0, high=1.0)
        _require_integer("top_k", self.top_k, low=-1, high=2**31 - 1)
        if self.seed is not None:
            _require_integer("seed", self.seed, low=0, high=MAX_SEED)
        if self.max_tokens is not None:
            _require_integer("max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError("must be true or false", field=name, value=getattr(self, name))
        if not isinstance(self.output_kind, OutputKind):
            raise InvalidRequestError("must be an OutputKind", field="output_kind", value=self.output_kind)
        object.__setattr__(self, "stop", _normalise_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _normalise_stop_token_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", field="stop", value=self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, so that the plain sample program will do."""
        return self.temperature == 0.0


def _require_number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        message = f"must be a finite number in {bracket}{low:g}, {high:g}], got {shorten(value)}"
        raise InvalidRequestError(message, field=name, value=value)


def _require_integer(name: str, value: object, *, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        message = f"must be an integer in [{low}, {high}], got {shorten(value)}"
        raise InvalidRequestError(message, field=name, value=value)


def _normalise_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())  # type: ignore[call-overload]
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"at most {MAX_STOP_STRINGS} strings, got {len(strings)}", field="stop", value=strings
        )
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"must be non-empty strings, got {shorten(string)}", field="stop", value=stop)
    return strings


def _normalise_stop_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    ids = tuple(ids or ())
    if len(ids) > MAX_STOP_TOKEN_IDS:
        message = f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}"
        raise InvalidRequestError(message, field="stop_token_ids", value=ids)
    for token_id in ids:
        _require_integer("stop_token_ids", token_id, low=0, high=2**31 - 1)
    return ids
