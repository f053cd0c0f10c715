"""A row of the table, and the look at an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel

from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.completions import CompletionRequest
from jaxserve.server.protocol.pooling import CohereEmbedRequest, PoolingRequest, RerankRequest, ScoreRequest
from jaxserve.server.protocol.responses import ResponseRequest
from jaxserve.server.protocol.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest

TEXT, CHAT, RESPOND, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"
RERANK, SCORE, POOL, COHERE = "/rerank", "/score", "/pooling", "/v2/embed"
HELLO = [{"role": "user", "content": "hi"}]
GOOD: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {  # a body of each endpoint that is served
    TEXT: (CompletionRequest, {"prompt": "Once upon a time", "max_tokens": 3}),
    CHAT: (ChatCompletionRequest, {"messages": HELLO, "max_tokens": 3}),
    RESPOND: (ResponseRequest, {"input": "hi", "max_output_tokens": 3}),
    EMBED: (EmbeddingRequest, {"input": "hi"}),
    RERANK: (RerankRequest, {"query": "hi", "documents": ["hi"]}),
    SCORE: (ScoreRequest, {"text_1": "hi", "text_2": "hi"}),
    POOL: (PoolingRequest, {"input": "hi"}),
    COHERE: (CohereEmbedRequest, {"texts": ["hi"]}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [100]}),
}
JSON = {"content-type": "application/json"}
CONTEXT_LENGTH = "This model's maximum context length is 1024 tokens"  # clients look for these words
_TYPES = {401: "authentication_error", 404: "not_found_error"}

Row = tuple[dict[str, Any], str] | tuple[dict[str, Any], str, str]
"""Fields that replace those of a good body, the `param` of the error, and its `code` unless that is invalid_value."""


@dataclass(frozen=True)
class Refusal:
    """A request, and the status and the error that it gets.

    Attributes:
        body: sent as JSON, unless it is bytes, or None for no body.
        param, code: those of the error. Its type follows from the status.
    """

    path: str
    body: Any
    param: str | None = None
    code: str | None = "invalid_value"
    status: int = 400
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    @property
    def error(self) -> dict[str, str | None]:
        """The error object but for its sentence."""
        return {"type": _TYPES.get(self.status, "invalid_request_error"), "param": self.param, "code": self.code}

    def send(self, http: httpx.Client, **changes: Any) -> httpx.Response:
        """Sends the request, with some fields of its body changed, and returns the answer."""
        body = {**self.body, **changes} if changes else self.body
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return http.request(self.method, self.path, content=content, headers=dict(self.headers))


def list_refusals(path: str, rows: Iterable[Row]) -> list[Refusal]:
    """Returns the refusals of an endpoint's good body with other fields."""
    return [Refusal(path, {**GOOD[path][1], **fields}, *error) for fields, *error in rows]


def check_error(answer: httpx.Response, status: int = 400) -> dict[str, str | None]:
    """Returns the error but for its sentence: the answer has OpenAI's form, and tells nothing about the machine."""
    shown = f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code == status, shown
    body = answer.json()
    assert set(body) == {"error"}, shown
    message, error = body["error"].pop("message"), body["error"]
    assert 10 < len(message) <= 500 and "\n" not in message, shown
    assert not re.search(r"Traceback|File \"|\.py\b|0x[0-9a-f]{6}|object at 0", answer.text), shown
    assert not re.search(r"Q{101}|é{101}", json.dumps([message, error], ensure_ascii=False)), "too much is echoed"
    if error["code"] == "context_length_exceeded":
        assert message.startswith(CONTEXT_LENGTH), shown
    if error["code"] == "unknown_parameter":
        assert f"'{error['param']}'" in message, shown
    return error


def check_refusal(answer: httpx.Response, row: Refusal) -> None:
    """The answer is the error of the row."""
    shown = f"{row.method} {row.path} {str(row.body)[:300]}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code == row.status, shown
    assert check_error(answer, row.status) == row.error, shown
