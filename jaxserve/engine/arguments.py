"""From the arguments of `LLM` and `AsyncLLM` to those of `RequestFactory`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.request import Request
from jaxserve.sampling_params import OutputKind

_INFINITY = float("inf")


def list_prompts(prompts: Any) -> list[Any]:
    """Returns a list of prompts. A text, a mapping or a list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = list(prompts)
    return [many] if many and isinstance(many[0], int) else many


def spread(given: Any, count: int, field: str) -> list[Any]:
    """Returns one value per prompt; a text, or a value that is not iterable, is repeated.

    Raises:
        InvalidRequestError: the number of values is not the number of prompts.
    """
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    values = [given] * count if is_one else list(given)
    if len(values) != count:
        message = f"one for all, or one for each of the {count} prompts; got {len(values)}"
        raise InvalidRequestError(message, field=field, value=len(values))
    return values


def make_requests(
    make: Callable[..., Request],
    prompts: Sequence[Any],
    params: Any,
    each: Mapping[str, Any],
    shared: Mapping[str, Any],
) -> list[Request]:
    """Returns one request per prompt, which gives one output, at its end.

    Args:
        make: the method of `RequestFactory`.
        params: sampling parameters, one for all prompts or one for each.
        each: further arguments of `make`, likewise.
        shared: further arguments of `make`, the same for all prompts.
    """
    count = len(prompts)
    finals = [replace(one, output_kind=OutputKind.FINAL_ONLY) for one in spread(params, count, "sampling_params")]
    own = {name: spread(given, count, name) for name, given in each.items()}
    return [
        make(prompt, finals[at], **{name: values[at] for name, values in own.items()}, **shared)
        for at, prompt in enumerate(prompts)
    ]


def find_deadline(timeout: Any) -> float | None:
    """Returns the deadline, on the clock of `time.monotonic`, `timeout` seconds from now; None without a timeout.

    Raises:
        InvalidRequestError: the timeout is not a finite number above 0.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < _INFINITY:
        message = f"must be a finite number of seconds above 0, got {shorten(timeout)}"
        raise InvalidRequestError(message, field="timeout", value=timeout)
    return time.monotonic() + timeout


def read_chat_options(
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
) -> dict[str, Any]:
    """Returns the template arguments of `RequestFactory.make_chat`."""
    begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    return {
        "tools": tools,
        "chat_template": chat_template,
        "add_generation_prompt": begins,
        "continue_final_message": continue_final_message,
        "variables": chat_template_kwargs,
    }
