"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from jaxserve.server.protocol.fields import (
    Effort,
    Integer,
    Labels,
    Objects,
    ResponseFormat,
    SamplingFields,
    Texts,
    Usage,
)


class ChatCompletionRequest(SamplingFields):
    """A conversation to answer. Messages and tools are checked where they are read."""

    messages: Objects
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    response_format: ResponseFormat | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    metadata: Labels | None = None  # without effect
    safety_identifier: str | None = None  # without effect
    store: bool | None = None
    modalities: Texts | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: Objects | None = None
    function_call: str | dict[str, Any] | None = None
    verbosity: str | None = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None  # without effect: prefixes are shared anyway
    # vLLM's
    best_of: Integer | None = None
    request_id: str | None = Field(None, min_length=1, max_length=256)  # the answer's id, after "chatcmpl-"
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # options of the image processor
    echo: bool | None = None
    include_reasoning: bool | None = None
    refused: ClassVar[dict[str, str]] = {
        "store": "nothing is stored here",
        "audio": "answers are text",
        "prediction": "leave it out",
        "web_search_options": "the server opens no address",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "verbosity": "say it in a message",
        "moderation": "nothing is moderated here",
        "prompt_cache_options": "prefixes are kept as long as there is room",
        "prompt_cache_retention": "prefixes are kept as long as there is room",
        "echo": "the client already has the conversation",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "verbosity": ("medium",),
        "function_call": ("none", "auto"),
        "prompt_cache_retention": ("in_memory", "in-memory"),
    }


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class FunctionCall(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCall(BaseModel):
    """A tool call, or, with `index`, a part of one."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same, by its older name
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
