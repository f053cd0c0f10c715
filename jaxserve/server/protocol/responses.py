"""`/v1/responses`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from jaxserve.errors import InvalidRequestError
from jaxserve.server.protocol.fields import (
    Body,
    Effort,
    Integer,
    Labels,
    Objects,
    ResponseFormat,
    SamplingFields,
    Texts,
)

HIDDEN_REASONING = "reasoning.encrypted_content"  # the value of `include` that is taken


class TextFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # ignored: the answer always matches the schema

    def to_response_format(self) -> ResponseFormat:
        """Returns the format in the fields of chat completions.

        Raises:
            InvalidRequestError: fields of a schema are given with another type.
        """
        given = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        if self.type != "json_schema" and given:
            message = f"needs type 'json_schema', got {self.type!r}"
            raise InvalidRequestError(message, field=f"response_format.{next(iter(given))}", value=self.type)
        schema = {"name": self.name or "answer", "schema": self.schema_} if self.type == "json_schema" else None
        return ResponseFormat.model_validate({"type": self.type, "json_schema": schema})


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None
    refused: ClassVar[dict[str, str]] = {"verbosity": "say it in a message"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None
    refused: ClassVar[dict[str, str]] = {
        "summary": "the reasoning itself is given",
        "generate_summary": "the reasoning itself is given",
        "context": "send only the items that the model should see",
        "mode": "there is one",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "summary": ("auto",),  # the best that there is: the reasoning itself, in the items' content
        "generate_summary": ("auto",),
        "context": ("auto", "all_turns"),
        "mode": ("standard",),
    }


class ResponseRequest(SamplingFields):
    """A conversation to answer through OpenAI's Responses API. Nothing is stored."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Labels | None = None  # without effect
    client_metadata: dict[str, Any] | None = None  # without effect
    safety_identifier: str | None = None  # without effect
    prompt_cache_key: str | None = None  # without effect: prefixes are shared anyway
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    include: Texts | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Integer | None = None
    top_logprobs: Integer | None = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # options of the image processor
    refused: ClassVar[dict[str, str]] = {
        "store": "nothing is stored here; send false or leave it out",
        "background": "nothing is stored here",
        "previous_response_id": "nothing is stored here; send the whole conversation as input",
        "conversation": "nothing is stored here; send the whole conversation as input",
        "prompt": "nothing is stored here; send the text as input",
        "max_tool_calls": "it bounds calls of hosted tools, and none runs here",
        "top_logprobs": "use /v1/chat/completions for log-probabilities",
        "access_programs": "there are none",
        "background_options": "nothing runs in the background here",
        "context_management": "send only what the model should see",
        "image": "answers are text",
        "moderation": "nothing is moderated here",
        "prompt_cache_options": "prefixes are kept as long as there is room",
        "prompt_cache_retention": "prefixes are kept as long as there is room",
        "n": "send the request several times",
        "prompt_logprobs": "use /v1/completions",
        "stream_options": "usage is in the last event anyway",
        "return_token_ids": "use /v1/chat/completions",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "top_logprobs": (0,),
        "prompt_cache_retention": ("in_memory", "in-memory"),
    }


class ResponseAnswer(BaseModel):
    """The answer. The tests check its items against OpenAI's types."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    service_tier: str | None = None
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
