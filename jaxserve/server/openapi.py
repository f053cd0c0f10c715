"""The OpenAPI document, for routes that read their bodies themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxserve.server.gate import needs_key
from jaxserve.server.options import AccessOptions
from jaxserve.server.protocol.tokens import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_EVENT = {  # an event of a stream
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_SCHEMES = {
    "bearerAuth": {"type": "http", "scheme": "bearer", "description": "One of the server's API keys."},
    "apiKeyAuth": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same, as Anthropic sends it.",
    },
}
_SECURITY: list[dict[str, list[str]]] = [{name: []} for name in _SCHEMES]  # either
_documented: list[tuple[type[BaseModel], str]] = []
_REFUSALS = {
    "400": "The request cannot be served; the body names the field.",
    "401": "No valid API key.",
    "403": "The Host or Origin header is not allowed, or the key may not have the tier or priority.",
    "404": "The model does not exist here.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json, or the body is compressed.",
    "429": "The queue is full; Retry-After says when to come again.",
    "500": "The request failed on the device.",
    "503": "The server is starting or shutting down.",
    "504": "The request's deadline passed.",
}


def document(
    request: type[BaseModel] | None,
    answer: type[BaseModel] | None = None,
    *,
    streams: bool = False,
    error: type[BaseModel] = ErrorBody,
    refusals: Sequence[str] = (),
    states: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns keyword arguments of a route's decorator that document its body and answers.

    Args:
        streams: the answer may be a stream of events.
        error: the body of the errors.
        refusals: statuses of errors. A route with a body has all of them.
        states: further statuses that are not errors, with their meaning.
    """
    for model, mode in ((request, "validation"), (answer, "serialization"), (error, "serialization")):
        if model is not None:
            _documented.append((model, mode))
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": _refer(answer)}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    responses: dict[str, Any] = {"200": {"description": "The answer.", **({"content": content} if content else {})}}
    extra: dict[str, Any] = {"responses": responses}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _refer(request)}}}
    refusal = {"application/json": {"schema": _refer(error)}}
    for status in _REFUSALS if request is not None else refusals:
        responses[status] = {"description": _REFUSALS[status], "content": refusal}
    responses |= {status: {"description": text} for status, text in states.items()}
    return {"response_model": None, "openapi_extra": extra}


def install_document(app: FastAPI, access: AccessOptions, *, has_keys: bool) -> None:
    """Makes `app.openapi` describe the bodies of all routes, and which routes need a key if the server has keys."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
            unique = list(dict.fromkeys(_documented))
            _, definitions = models_json_schema(unique, ref_template=_REFERENCE)  # type: ignore[arg-type]
            schema["components"] = {"schemas": definitions["$defs"], "securitySchemes": _SCHEMES}
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's own validation, which is not used
                    operation["security"] = _SECURITY if has_keys and needs_key(path, access) else []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = make  # type: ignore[method-assign]


def _refer(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
