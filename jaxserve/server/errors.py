"""Errors in the format of the path's protocol, OpenAI's or Anthropic's: a status, and a body that names the field."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from jaxserve import errors
from jaxserve.errors import JaxServeError, shorten

_log = logging.getLogger(__name__)
_CONTEXT_LENGTH = "This model's maximum context length is"  # client libraries look for these words
_MOST_TEXT, _MOST_ECHO = 400, 100  # characters of a message, and of a single word in it
_OURS = "The server failed on this request; the reason is in its log."
_FAILURES = {
    "non_finite_logits": "The model's logits for this request are not finite.",
    "device_step_failed": "The device failed on a step of this request; the engine continues.",
    "engine_stopped": "The engine has failed; the server is shutting down.",
}
_STATUS: tuple[tuple[type[JaxServeError], int, str], ...] = (
    (errors.QueueFullError, 429, "rate_limit_exceeded"),
    (errors.DeadlineError, 504, "timeout"),
    (errors.NonFiniteLogitsError, 500, "non_finite_logits"),
    (errors.DeviceStepError, 500, "device_step_failed"),
    (errors.EngineStoppedError, 500, "engine_stopped"),
    (errors.InvalidRequestError, 400, "invalid_value"),
    (errors.CapacityError, 400, "invalid_value"),
    (errors.TokenizerError, 400, "invalid_value"),
    (errors.NoTokenLeftError, 400, "invalid_value"),
    (errors.GrammarError, 400, "invalid_value"),
)
_MESSAGES_PATH = re.compile(r"/v1/messages(/|$)")
_MESSAGES_TYPES = {  # Anthropic's names
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "overloaded_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Anthropic's clients go on without a thread when they see this, and send the whole conversation.
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error answer with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def messages_body(self) -> dict[str, Any]:
        """The JSON body in Anthropic's format. Its message names the field."""
        message = self.message
        if self.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # clients of this protocol look for these words
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details = {"details": _UNTHREADED} if self.param == "thread" else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def to_response(self, path: str = "") -> JSONResponse:
        """Returns the HTTP response in the form of the requested path."""
        return JSONResponse(self.messages_body if is_messages(path) else self.body, self.status, self.headers)


def is_messages(path: str) -> bool:
    """Whether a path belongs to Anthropic's Messages API."""
    return _MESSAGES_PATH.search(path) is not None


def to_api_error(error: BaseException, retry_after: int = 1) -> ApiError:
    """Returns the answer to an error. Only errors meant for users keep their message."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return _explain(error, status, code, retry_after)
    _log.error("internal error", exc_info=error)
    return ApiError(500, _OURS, code="internal_error")


def drop_tracebacks(error: BaseException) -> None:
    """Drops the tracebacks of an answered refusal, and of the errors behind it.

    Their frames hold the body and all that was made of it, and refer to errors again: it would stay in memory until
    garbage is collected.
    """
    each: BaseException | None = error
    while each is not None and each.__traceback__ is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__


def _explain(error: JaxServeError, status: int, code: str, retry_after: int) -> ApiError:
    message, field = str(error), getattr(error, "field", None)
    headers = {}
    if status == 429:
        headers["Retry-After"] = str(retry_after)
    if status == 504:
        headers["x-should-retry"] = "false"  # otherwise clients retry at once and wait as long again
    if status == 500:
        _log.error("a request failed: %s", message)
        message = _FAILURES[code]
    if (at := message.find(_CONTEXT_LENGTH)) >= 0:
        message, code = message[at:], "context_length_exceeded"
    param = None if field is None else _bound(field)  # it may end with a name that a client chose
    return ApiError(status, _bound(message), param=param, code=code, headers=headers)


def _bound(message: str) -> str:
    """Returns a message shortened to a fixed length: libraries may quote whole lines of input."""
    words = (word if len(word) <= _MOST_ECHO else f"{word[: _MOST_ECHO - 3]}..." for word in message.split())
    text = " ".join(words)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


def explain_validation(error: ValidationError) -> ApiError:
    """Returns the most specific of the errors in a body."""
    found = error.errors(include_url=False)
    worst = max(found, key=lambda each: (each["type"] == "unknown_parameter", len(each["loc"])))
    kind, parts = worst["type"], [part for part in worst["loc"] if not _is_type_name(part)]
    if isinstance(cause := worst.get("ctx", {}).get("error"), errors.InvalidRequestError):
        return to_api_error(cause)
    if kind == "json_invalid":
        reason = worst["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
    if kind == "unknown_parameter":
        parts.append(worst["ctx"]["name"])
    elif not parts:
        return ApiError(400, f"The body must be a JSON object, got {shorten(worst['input'])}.", code="invalid_value")
    # Clients choose these names, so they may have any length.
    param = _quote("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)[1:])
    if kind == "unknown_parameter":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    message = f"Invalid value for '{param}': {worst['msg'].lower()}, got {shorten(worst['input'])}."
    return ApiError(400, message, param=param, code="invalid_value")


def _quote(text: str) -> str:
    """Returns the text escaped, on one line, and shortened."""
    text = repr(text)[1:-1]
    return text if len(text) <= _MOST_ECHO else f"{text[: _MOST_ECHO - 3]}..."


def _is_type_name(part: object) -> bool:
    """Whether a part of an error's path names a branch of a union, not a field."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)
