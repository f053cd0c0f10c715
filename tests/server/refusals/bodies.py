"""Bodies that are no JSON, no object, or too much, and requests that no endpoint takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.server.conftest import MAX_BODY
from tests.server.refusals.refusal import CHAT, EMBED, GOOD, JSON, RESPOND, TEXT, Refusal

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "timeout")
INTEGERS = ("n", "seed", "top_k", "min_tokens", "priority", "prompt_logprobs", "truncate_prompt_tokens")
NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400")
NO_INTEGERS = (b"1.5", b"1e-3", b"9" * 40, b"-" + b"9" * 40)
LONGEST_NAME = 100  # characters of a parameter's name in an error

MALFORMED = [
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"\\udc00\\ud800"}',
    b'{"prompt":"a\xff"}',
    b'{"prompt":"\xed\xa0\x80"}',
    b'{"prompt":"\xc0\x80"}',
    b'{"\\ud800":1}',
    b'{"prompt":"a\x00b"}',
    b'{"prompt":"a\nb"}',
    b'{"prompt":"a"',
    b'{"prompt":"a",}',
    b'{"prompt":"a"} x',
    b'{"prompt":"a"}{"prompt":"a"}',
    b'{"prompt":01}',
    b'{"prompt":.5}',
    b'{"prompt":+1}',
    b'{"prompt":0x10}',
    b'{"prompt":"\\x41"}',
    b'{"prompt":"\\u12"}',
    b'{"prompt":undefined}',
    b'{prompt:"a"}',
    b'// a\n{"prompt":"a"}',
    b"[" * 100_000,
    b'{"a":' * 60_000 + b"1" + b"}" * 60_000,  # of more keys than that nothing is parsed: 413
    b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"structured_outputs":{"json":' + b'{"a":' * 5000 + b"1" + b"}" * 5002,
    "{}".encode("utf-16"),
    "{}".encode("utf-32"),
    b"\x1f\x8b\x08\x00",
    b"prompt=a&max_tokens=3",
    *(b"", b"{", b"{}}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{'a': 1}"),
]
NO_OBJECTS = (b"null", b"[]", b'"a"', b"5")
NAMES = ("best_friend", "Prompt", "", "str", "a[b]", "a.b", "__class__", "é" * 300, "Q" * 5000, "a\nb\x1b")
MEDIA: list[tuple[dict[str, str], str]] = [  # heads of a body, and the code of the refusal, 415
    *(
        ({"content-type": kind}, "unsupported_media_type")
        for kind in (
            *("text/plain", "text/plain;charset=UTF-8", "multipart/form-data; boundary=a", "a", ""),
            "application/x-www-form-urlencoded",
        )
    ),
    *(
        ({**JSON, "content-encoding": name}, "unsupported_content_encoding")
        for name in ("gzip", "deflate", "br", "zstd", "gzip, identity")
    ),
]
MODELS = ("gpt-4", "", "../../etc/passwd", "demo ", "Q" * 5000)
PATHS = ("/v2", "/v1", "/v1/chat", "/v1/completion", "/start_profile", "/pause", "/invocations", "/.env", "/%ff")
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")


def list_bodies(path: str) -> Iterator[Refusal]:
    """Yields what is no JSON, no object or too large: all of it for one path, since every path reads bodies alike."""
    malformed, heads = (MALFORMED, MEDIA) if path == TEXT else (MALFORMED[:3], MEDIA[::6])
    for raw in malformed:
        yield Refusal(path, raw, None, "invalid_json")
    for raw in NO_OBJECTS:
        yield Refusal(path, raw)
    for head, code in heads:
        yield Refusal(path, json.dumps(GOOD[path][1]).encode(), None, code, 415, headers=head)
    yield Refusal(path, b" " * (MAX_BODY + 1), None, "body_too_large", 413)


def list_names(path: str) -> Iterator[Refusal]:
    """Yields unknown fields and models, and the missing field."""
    good = GOOD[path][1]
    has_choice = path in ("/tokenize", "/score")  # which take messages, or queries, too
    code = "invalid_value" if has_choice else "missing_required_parameter"
    yield Refusal(path, {}, next(iter(good)), code)
    for name in NAMES:
        shown = repr(name)[1:-1]
        shown = shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 3]}..."
        yield Refusal(path, {**good, name: 1}, shown, "unknown_parameter")
    for name in MODELS:
        yield Refusal(path, {**good, "model": name}, "model", "model_not_found", 404)


def list_numbers(path: str) -> Iterator[Refusal]:
    """Yields fields with numbers that are none: each of them for one path, since the fields of all have equal types."""
    head = json.dumps(GOOD[path][1])[:-1].encode()
    most = None if path == TEXT else 1

    def give(field: str, value: bytes, *error: str) -> Refusal:
        return Refusal(path, head + b',"%s":%s}' % (field.encode(), value), *error)

    for field in NUMBERS + INTEGERS:
        for value in NO_NUMBERS[:most]:
            yield give(field, value, field)
    for field in INTEGERS:
        for value in NO_INTEGERS[:most]:
            yield give(field, value, field)
        yield Refusal(path, head + b',"%s":%s}' % (field.encode(), b"9" * 5000), None, "invalid_json")
    yield give("logit_bias", b'{"5":NaN}', "logit_bias.5")
    for schema in (b'{"json":{"maximum":1e400}}', b'{"json":{"minimum":NaN}}'):
        yield give("structured_outputs", schema, "structured_outputs.json")


def list_overlong(path: str) -> Iterator[Refusal]:
    """Yields prompts that are longer than the context, by tokens and by bytes."""
    field = {TEXT: "prompt", CHAT: "messages"}.get(path, "input")
    for count in (1100, 3000, 150_000):
        text: Any = "word " * count
        changes = [{field: [{"role": "user", "content": text}] if path == CHAT else text}]
        changes += [{"prompt": [5] * min(count, 9000)}] if path == TEXT else []
        for change in changes:
            yield Refusal(path, {**GOOD[path][1], **change}, field, "context_length_exceeded")


def list_routes() -> Iterator[Refusal]:
    """Yields paths, methods and models that there are not."""
    for path in PATHS:
        yield Refusal(path, None, None, None, 404, "GET")
        yield Refusal(path, {}, None, None, 404)
    for path in GOOD:
        for method in METHODS:
            yield Refusal(path, None, None, None, 405, method)
    for path in ("/v1/models", "/health", "/metrics", "/version"):
        yield Refusal(path, {}, None, None, 405)
    for name in ("gpt-4", "..%2f..%2fetc%2fpasswd", "%00", "demo%20", "a/b"):
        yield Refusal(f"/v1/models/{name}", None, "model", "model_not_found", 404, "GET")
    yield Refusal("/v1/responses/resp_1", None, None, None, 404, "GET")


def list_all() -> list[Refusal]:
    """Returns the refusals of this module for every path."""
    found = [row for path in GOOD for rows in (list_bodies(path), list_names(path)) for row in rows]
    found += [row for path in (TEXT, CHAT, RESPOND) for row in list_numbers(path)]
    found += [row for path in (TEXT, CHAT, RESPOND, EMBED) for row in list_overlong(path)]
    return [*found, *list_routes()]
