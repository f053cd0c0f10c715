"""From the bytes of a request to a checked body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from jaxserve.server.errors import ApiError, explain_validation
from jaxserve.server.gate import too_large
from jaxserve.server.generation import make_request_options
from jaxserve.server.protocol.fields import Body
from jaxserve.server.state import ServerState

_PREPARE_HERE = 2048  # bytes whose text is rendered and tokenized on the event loop
_SLOW_FIELDS = ("response_format", "structured_outputs", "text", "tools", "bad_words", "chat_template")
_PARSE_HERE = 64 * 2**10  # bytes that are parsed on the event loop, in about a millisecond at worst


async def read_body[B: Body](request: Request, kind: type[B], state: ServerState) -> B:
    """Returns the body, of which nothing unknown is let pass.

    Raises:
        ApiError: 400 for what is malformed, 408 when it does not come, 413 when it is too large.
    """
    raw = await _collect(request, state)
    body = _parse(raw, kind) if len(raw) <= _PARSE_HERE else await state.run_in_thread(_parse, raw, kind)
    body.refuse_unsupported()
    return body


def _parse[B: Body](raw: bytes, kind: type[B]) -> B:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise explain_validation(error) from None


async def prepare[B: Body, T](
    request: Request, body: B, state: ServerState, make: Callable[[B, ServerState, dict[str, Any]], T]
) -> T:
    """Returns what `make` makes of a body: templates, tokens and grammars take as long as the text and the schemas are.

    A short text is done at once: that takes a fraction of a millisecond, and a thread would wait for the GIL to begin.
    """
    options = make_request_options(request, body, state)
    if _is_short(request, body):
        return make(body, state, options)
    made: T = await state.run_in_thread(make, body, state, options)
    return made


def _is_short(request: Request, body: Body) -> bool:
    length = request.headers.get("content-length", "")
    if not (length.isdigit() and int(length[:20]) <= _PREPARE_HERE):
        return False
    if isinstance(getattr(body, "prompt", None), list) or isinstance(getattr(body, "input", None), list):
        return False
    return all(getattr(body, name, None) is None for name in _SLOW_FIELDS)


async def _collect(request: Request, state: ServerState) -> bytes:
    limits = state.config.limits
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for piece in request.stream():
                size += len(piece)
                if size > limits.max_body_bytes:
                    raise too_large(limits.max_body_bytes)
                pieces.append(piece)
    except TimeoutError:
        message = f"The body did not arrive within {limits.body_timeout:g} s."
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(499, "The client has gone.", code="client_gone") from None
    return b"".join(pieces)
