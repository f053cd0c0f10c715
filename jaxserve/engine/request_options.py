"""The options of a request, beside its prompt and its sampling parameters.

`LLM` and `AsyncLLM` take arguments. They are read into options of `RequestFactory`, and these into fields of a
`Request`. Other modules pass them on and know none by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.lora_options import LoRARequest
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import DEFAULT_TENANT, PRIORITIES, SERVICE_TIERS, Adapter, Request, ServiceTier, Tenant
from jaxserve.sampling_params import OutputKind
from jaxserve.vllm_names import check_arguments

if TYPE_CHECKING:
    from jaxserve.media.prompt import ImageTokens
    from jaxserve.tokenizers.chat import Renderer

type FindAdapter = Callable[[LoRARequest], Adapter]
_INFINITY = float("inf")


class RequestArguments(TypedDict, total=False):
    """The arguments of `generate`, each of which may be left out. A list has one value for each prompt."""

    priority: int | Sequence[int]
    service_tier: str | Sequence[str]
    cache_salt: str
    timeout: float | None  # seconds
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


class ChatArguments(RequestArguments, total=False):
    """The arguments of `chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None  # None: unless a message is continued
    continue_final_message: bool
    mm_processor_kwargs: Mapping[str, Any] | None


class PoolingArguments(TypedDict, total=False):
    """The arguments of `classify`."""

    pooling_params: PoolingParams | None
    truncate_prompt_tokens: int | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


class EmbedArguments(PoolingArguments, total=False):
    """The arguments of `embed`."""

    prompt_name: str | None


class EncodeArguments(EmbedArguments, total=False):
    """The arguments of `encode`."""

    pooling_task: str | None


class ScoreArguments(PoolingArguments, total=False):
    """The arguments of `score`."""

    max_tokens_per_doc: int | None
    chat_template: str | None


class RequestOptions(TypedDict, total=False):
    """The options of `RequestFactory.make`, each of which may be left out."""

    cache_salt: str  # requests share prefix pages only if their salts are equal
    priority: int  # smaller ones run first within a tier; equal ones in order of arrival
    service_tier: ServiceTier | str  # or a name in SERVICE_TIERS
    tenant: Tenant
    lora_request: LoRARequest | None  # the adapter
    deadline: float | None  # on the clock of `time.monotonic`; an unfinished request then ends with a DeadlineError


class ChatOptions(RequestOptions, total=False):
    """The options of `RequestFactory.make_chat`: also those of `encode_chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    render: Renderer | None
    variables: Mapping[str, Any] | None
    defaults: Mapping[str, Any] | None
    image_tokens: ImageTokens | None


_KNOWN: Mapping[str, frozenset[str]] = {
    "generate": RequestArguments.__optional_keys__,
    "chat": ChatArguments.__optional_keys__,
    "embed": EmbedArguments.__optional_keys__,
    "classify": PoolingArguments.__optional_keys__,
    "encode": EncodeArguments.__optional_keys__,
    "score": ScoreArguments.__optional_keys__,
    "beam_search": frozenset({"lora_request"}),
}
_ONE_EACH = ("priority", "service_tier", "lora_request")  # arguments that may be lists


def read_arguments(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `RequestFactory` for the arguments of a method ("LLM.generate").

    Raises:
        InvalidRequestError: one of vLLM's arguments has a value that cannot be honoured, or the timeout is wrong.
        TypeError: no engine's method has such an argument.
    """
    _, _, name = method.partition(".")
    check_arguments(method, {key: value for key, value in given.items() if key not in _KNOWN[name]})
    options = {key: value for key, value in given.items() if key in _KNOWN[name]}
    given_adapters = options.get("lora_request")
    for wanted in given_adapters if isinstance(given_adapters, list | tuple) else (given_adapters,):
        _check_adapter(wanted)
    if "timeout" in options:
        options["deadline"] = find_deadline(options.pop("timeout"))
    if name == "chat":
        begins, continues = options.get("add_generation_prompt"), options.get("continue_final_message", False)
        options["add_generation_prompt"] = not continues if begins is None else begins
        options["variables"] = options.pop("chat_template_kwargs", None)
    return options


def make_requests(
    make: Callable[..., Request], prompts: Sequence[Any], options: Mapping[str, Any], params: Any
) -> list[Request]:
    """Returns one request per prompt, which gives one output, at its end.

    Args:
        make: the method of `RequestFactory`.
        options: of `read_arguments`.
        params: sampling parameters, one for all prompts or one for each.
    """
    count = len(prompts)
    finals = [replace(one, output_kind=OutputKind.FINAL_ONLY) for one in spread(params, count, "sampling_params")]
    each = zip(prompts, finals, spread_options(options, count), strict=True)
    return [make(prompt, final, **own) for prompt, final, own in each]


def spread_options(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Returns the options of each of `count` prompts; InvalidRequestError: a list has another number of values."""
    lists = {name: spread(options[name], count, name) for name in _ONE_EACH if name in options}
    return [{**options, **{name: values[at] for name, values in lists.items()}} for at in range(count)]


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


def split_options(options: Mapping[str, Any], find_adapter: FindAdapter) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of a `Request` that `ChatOptions` give (`make_fields`), and the arguments of `encode_chat`."""
    known = RequestOptions.__optional_keys__
    fields = make_fields({name: value for name, value in options.items() if name in known}, find_adapter)
    return fields, {name: value for name, value in options.items() if name not in known}


def check_options(
    *,
    cache_salt: object = "",
    priority: object = 0,
    service_tier: object = ServiceTier.DEFAULT,
    tenant: Tenant = DEFAULT_TENANT,
    lora_request: object = None,
    deadline: object = None,
) -> dict[str, Any]:
    """Returns the fields of a `Request` that `RequestOptions` give, and the `lora_request`, of which one is made.

    InvalidRequestError names the option that is wrong.
    """
    if not isinstance(cache_salt, str):
        raise InvalidRequestError(f"must be a text, got {shorten(cache_salt)}", field="cache_salt", value=cache_salt)
    if not isinstance(priority, int) or isinstance(priority, bool) or priority not in PRIORITIES:
        message = f"must be an integer in [{PRIORITIES.start}, {PRIORITIES.stop}), got {shorten(priority)}"
        raise InvalidRequestError(message, field="priority", value=priority)
    _check_adapter(lora_request)
    _check_deadline(deadline)
    return {
        "cache_salt": cache_salt,
        "priority": priority,
        "service_tier": _read_tier(service_tier),
        "tenant": tenant,
        "lora_request": lora_request,
        "deadline": deadline,
    }


def refuse_adapter(wanted: LoRARequest) -> NoReturn:
    """Raises the InvalidRequestError of an engine without adapters."""
    message = "needs enable_lora, and this engine was started without it"
    raise InvalidRequestError(message, field="lora_request", value=wanted)


def make_fields(options: Mapping[str, Any], find_adapter: FindAdapter) -> dict[str, Any]:
    """Returns the fields of a `Request` that `RequestOptions` give; its adapter is read now if there is no copy of it.

    Raises:
        InvalidRequestError: names the option that is wrong.
        ConfigError, WeightsError: the adapter cannot be read.
    """
    fields = check_options(**options)
    wanted = fields.pop("lora_request")
    return {**fields, "adapter": find_adapter(wanted) if isinstance(wanted, LoRARequest) else wanted}


def _check_adapter(wanted: object) -> None:
    if wanted is not None and not isinstance(wanted, LoRARequest | Adapter):
        message = f"must be a LoRARequest, got {shorten(wanted)}"
        raise InvalidRequestError(message, field="lora_request", value=wanted)


def _check_deadline(deadline: object) -> None:
    if deadline is None:
        return
    if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not -_INFINITY < deadline < _INFINITY:
        message = f"must be a finite time in seconds of time.monotonic(), got {shorten(deadline)}"
        raise InvalidRequestError(message, field="deadline", value=deadline)


def _read_tier(tier: object) -> ServiceTier:
    if isinstance(tier, ServiceTier):
        return tier
    if not isinstance(tier, str) or tier not in SERVICE_TIERS:
        message = f"must be one of {', '.join(SERVICE_TIERS)}, got {shorten(tier)}"
        raise InvalidRequestError(message, field="service_tier", value=tier)
    return SERVICE_TIERS[tier]
