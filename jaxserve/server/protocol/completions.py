"""`/v1/completions`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from jaxserve.server.protocol.fields import Integer, Prompts, ResponseFormat, SamplingFields, Usage


class CompletionRequest(SamplingFields):
    """Prompts to continue: one or many, as text or token ids."""

    prompt: Prompts
    max_tokens: Integer | None = 16
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None
    request_id: str | None = Field(None, min_length=1, max_length=256)  # vLLM's: the answer's id, after "cmpl-"
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    refused: ClassVar[dict[str, str]] = {
        "suffix": "the served models do not infill",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "content_filter"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """The answer, or one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None
    service_tier: str | None = None
