"""Reads, parses and validates request bodies, and prepares them for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from jaxserve.server.errors import ApiError, explain_validation
from jaxserve.server.gate import too_large
from jaxserve.server.generation import make_request_options
from jaxserve.server.grammar_lane import NewGrammarError
from jaxserve.server.images import NewImagesError
from jaxserve.server.protocol.fields import Body
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import ServerState
from jaxserve.server.stream import run_while_connected
from jaxserve.structured_params import StructuredOutputsParams

_PREPARE_HERE = 2048  # bytes; smaller bodies are rendered and tokenized on the event loop
_SLOW_FIELDS = ("response_format", "structured_outputs", "text", "tools", "output_config", "bad_words", "chat_template")
_LISTS = ("prompt", "input", "documents", "texts", "text_1", "text_2", "queries")  # fields that may have many texts
_PARSE_HERE = 64 * 2**10  # bytes; smaller bodies are parsed on the event loop, in a few milliseconds at most
# Parsing time depends on the number of members more than on bytes, and the parser holds the GIL: a million keys take
# a second.
MAX_KEYS, MAX_ITEMS = 2**16, 2**22
_ESCAPES = 8  # the longest run of backslashes before a quote that is counted; even


async def read_body[B: Body](request: Request, kind: type[B], state: ServerState) -> B:
    """Returns the validated body; unknown fields are errors.

    Raises:
        ApiError: 400 when it is malformed, 408 when it does not arrive in time, 413 when it is too large, 429 when
            all bodies together are.
    """
    raw = await _collect(request, state)
    body = _parse(raw, kind) if len(raw) <= _PARSE_HERE else await state.preparation.run(_parse_large, raw, kind)
    body.refuse_unsupported()
    return body


def _parse_large[B: Body](raw: bytes, kind: type[B]) -> B:
    _refuse_many_members(raw)
    return _parse(raw, kind)


def _refuse_many_members(raw: bytes) -> None:
    """Refuses JSON with so many members that parsing it would block other requests; ApiError 413.

    Commas inside strings count as items. A quote followed by a colon ends a key unless the quote is escaped, that is,
    follows an odd number of backslashes. Keys are therefore counted by inclusion and exclusion over runs of
    backslashes, in time that does not depend on the content. Runs beyond the longest one counted pass as keys.
    """
    keys = 0
    if raw.count(b":") > MAX_KEYS:
        dense = raw.translate(None, b" \t\r\n")
        keys = sum((-1) ** length * dense.count(b"\\" * length + b'":') for length in range(_ESCAPES + 1))
    if keys > MAX_KEYS or raw.count(b",") >= MAX_ITEMS:
        message = f"The body has more than {MAX_KEYS} keys or {MAX_ITEMS} items."
        raise ApiError(413, message, code="body_too_large")


def _parse[B: Body](raw: bytes, kind: type[B]) -> B:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise explain_validation(error) from None


async def prepare[B: Body, T](
    request: Request, body: B, state: ServerState, make: Callable[[B, ServerState, dict[str, Any]], T]
) -> T:
    """Returns `make(body, state, options)`, run in a thread unless the body is short.

    Images are loaded apart, and a new grammar is compiled apart, because they may take long. What is made then is made
    once more, with the images among the options.
    """
    options = make_request_options(request, body, state)
    longest_wait = state.config.limits.find_longest_wait(options["service_tier"])
    options["lora_request"] = await state.adapters.find(options["lora_request"])  # one load for all that is made
    known: dict[str, Any] = {}  # grammars by key
    options["compile_grammar"] = partial(_find_grammar, state, known)
    while True:
        try:
            made = await _prepare(request, body, state, partial(make, body, state, options), longest_wait)
            break
        except NewImagesError as new_images:
            assert state.images is not None
            load = state.images.load(request, new_images, longest_wait)
            options["images"] = await run_while_connected(request, load, state)
        except NewGrammarError as new:
            owner, compile_it = get_context(request.scope).salt, state.engine.requests.grammars.compile
            known[new.params.key] = await state.grammars.compile(
                compile_it, new.params, owner=owner, longest_wait=longest_wait
            )
    if (share := get_context(request.scope).body_share) is not None:
        share.close()
    return made


async def _prepare[T](
    request: Request, body: Body, state: ServerState, make: Callable[[], T], longest_wait: float | None
) -> T:
    made: T
    if _is_short(request, body):
        made = await state.preparation.run_quickly(make, longest_wait=longest_wait)
    else:
        brings_template = getattr(body, "chat_template", None) is not None
        made = await state.preparation.run(make, brings_template=brings_template, longest_wait=longest_wait)
    return made


def _find_grammar(state: ServerState, known: Mapping[str, Any], params: StructuredOutputsParams) -> Any:
    """Returns a compiled grammar; NewGrammarError where it must be compiled first."""
    grammar = known.get(params.key)
    if grammar is None:
        grammar = state.engine.requests.grammars.find(params)
    if grammar is None:
        raise NewGrammarError(params)
    return grammar


def _is_short(request: Request, body: Body) -> bool:
    length = request.headers.get("content-length", "")
    if not (length.isdigit() and int(length[:20]) <= _PREPARE_HERE):
        return False
    if any(isinstance(getattr(body, name, None), list) for name in _LISTS):
        return False
    return all(getattr(body, name, None) is None for name in _SLOW_FIELDS)


async def _collect(request: Request, state: ServerState) -> bytes:
    limits = state.config.limits
    share = get_context(request.scope).body_share = state.bodies.open()
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for piece in request.stream():
                size += len(piece)
                if size > limits.max_body_bytes:
                    raise too_large(limits.max_body_bytes)
                share.grow(size)
                pieces.append(piece)
    except TimeoutError:
        message = f"The body did not arrive within {limits.body_timeout:g} s."
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(499, "The client has gone.", code="client_gone") from None
    return b"".join(pieces)
