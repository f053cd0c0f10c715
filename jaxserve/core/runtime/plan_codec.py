"""Plans and masks as values of JSON, and back.

What is read is checked against the types of the fields, so a new field of a plan needs no line here, and nothing is
unpickled. Everything read that is not as it should be is a ValueError, TypeError or KeyError.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import types
import zlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.structured_params import StructuredOutputsParams

_MASK_LINES = 1024  # kept for steps to come; a line is 16 KiB for a vocabulary of 128k
_WORD = np.dtype("<u4")


class PlanEncoder:
    """Turns plans into the fields that differ from the plan before: a step that decodes the same rows has few."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def encode(self, plan: StepPlan) -> dict[str, Any]:
        """Returns the plan's fields by name; objects in them are for `encode_object`."""
        last, self._last = self._last, plan
        found = {}
        for name, _ in _list_fields(StepPlan):
            value = getattr(plan, name)
            if last is None or value != getattr(last, name):
                found[name] = value
        return found


class PlanDecoder:
    """Turns what a `PlanEncoder` made, in the same order, into the same plans."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def decode(self, changes: Any) -> StepPlan:
        """Returns the plan of fields read from JSON."""
        values = _read_fields(StepPlan, changes)
        self._last = StepPlan(**values) if self._last is None else dataclasses.replace(self._last, **values)
        return self._last


def describe_fields(kind: Any = StepPlan) -> dict[str, list[str]]:
    """Returns the fields of plans, by the name of each dataclass in them: "name: type"."""
    if not dataclasses.is_dataclass(kind):
        return {name: found for part in get_args(kind) for name, found in describe_fields(part).items()}
    found = {kind.__name__: [f"{f.name}: {f.type}" for f in dataclasses.fields(kind)]}  # type: ignore[union-attr]
    for hint in get_type_hints(kind).values():
        found |= describe_fields(hint)
    return found


def encode_object(value: object) -> Any:
    """Returns what JSON writes for a dataclass: its fields that differ from their defaults; or for an enum or bytes."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return {name: each for name, default in _list_fields(type(value)) if (each := getattr(value, name)) != default}


@functools.cache
def _list_fields(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.default) for f in dataclasses.fields(kind))


def _read_fields(kind: type, values: Any) -> dict[str, Any]:
    readers = _list_readers(kind)
    if not isinstance(values, dict) or not values.keys() <= readers.keys():
        raise ValueError(f"not the fields of a {kind.__name__}")
    return {name: readers[name](value) for name, value in values.items()}


@functools.cache
def _list_readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind)
    return {f.name: _find_reader(hints[f.name]) for f in dataclasses.fields(kind)}


def _find_reader(hint: Any) -> Callable[[Any], Any]:
    """Returns the function that turns a value of JSON into one of a field's type."""
    if hint is SamplingParams:
        return _read_params
    if hint in (int, bool, str):
        return functools.partial(_require, hint)
    if hint is bytes:
        return lambda value: base64.b64decode(_require(str, value), validate=True)
    if dataclasses.is_dataclass(hint):
        return lambda value: hint(**_read_fields(hint, value))  # type: ignore[operator]
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        readers = [_find_reader(part) for part in parts if part is not Ellipsis]
        return functools.partial(_read_tuple, readers, parts[-1] is Ellipsis)
    if isinstance(hint, types.UnionType) and parts[1:] == (types.NoneType,):
        read = _find_reader(parts[0])
        return lambda value: None if value is None else read(value)
    raise TypeError(f"a field of type {hint} cannot be read from a recording")


def _require(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"must be {kind.__name__}, got {type(value).__name__}")
    return value


def _read_tuple(readers: list[Callable[[Any], Any]], is_repeated: bool, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list, got {type(value).__name__}")
    if is_repeated:
        return tuple([readers[0](each) for each in value])
    return tuple([read(each) for read, each in zip(readers, value, strict=True)])


def _read_params(value: Any) -> SamplingParams:
    given = dict(_require(dict, value))
    if "output_kind" in given:
        given["output_kind"] = OutputKind(given["output_kind"])
    if given.get("structured_outputs") is not None:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)  # which checks and normalises what it is given


_list_readers(StepPlan)  # a field that could not be read back must not be written either


class MaskEncoder:
    """Turns masks into numbers of lines, and the lines that have not been written yet.

    Grammars ask for the same few lines again and again: inside a string of JSON it is one line for each token.
    """

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}  # by line, least recently used first

    def encode(self, mask: np.ndarray) -> dict[str, Any]:
        """Returns `slots`, the number of each row's line, and `lines`, those to write or to replace, by number."""
        most = max(_MASK_LINES, 2 * len(mask))  # so that no line of this mask gives way to another
        slots, lines = [], {}
        for row in mask:
            line = row.astype(_WORD, copy=False).tobytes()
            slot = self._slots.pop(line, None)
            if slot is None:
                has_room = len(self._slots) < most
                slot = len(self._slots) if has_room else self._slots.pop(next(iter(self._slots)))
                lines[slot] = base64.b64encode(zlib.compress(line, 1)).decode()
            self._slots[line] = slot
            slots.append(slot)
        return {"slots": slots, "lines": lines}


class CallEncoder:
    """Turns calls of a `Runner` into values of JSON; plans and masks as what differs from those before."""

    def __init__(self) -> None:
        self._plans, self._masks = PlanEncoder(), MaskEncoder()

    def start(self, plan: StepPlan) -> dict[str, Any]:
        """Returns the call that starts a step."""
        return {"call": "start", "plan": self._plans.encode(plan)}

    def sample(self, step_id: int, mask: np.ndarray | None) -> dict[str, Any]:
        """Returns the call that samples a started step."""
        call: dict[str, Any] = {"call": "sample", "step": step_id}
        if mask is not None:
            call["mask"] = self._masks.encode(mask)
        return call


class MaskDecoder:
    """Turns what a `MaskEncoder` made, in the same order, into the same masks."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._lines: dict[int, np.ndarray] = {}

    def decode(self, written: Mapping[str, Any]) -> np.ndarray:
        """Returns a mask uint32 [rows, words]."""
        for slot, text in _require(dict, written["lines"]).items():
            try:
                data = zlib.decompressobj().decompress(base64.b64decode(text), 4 * self._num_words + 1)
            except zlib.error as error:
                raise ValueError(f"a line of a mask is not zlib's: {error}") from error
            if len(data) != 4 * self._num_words:
                raise ValueError(f"a line of a mask must have {4 * self._num_words} bytes, got {len(data)} or more")
            self._lines[int(slot)] = np.frombuffer(data, _WORD).astype(np.uint32, copy=False)
        return np.stack([self._lines[slot] for slot in written["slots"]])
