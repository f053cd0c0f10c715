"""`/v1/messages` and `/v1/messages/count_tokens`, in Anthropic's fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.server.protocol.fields import Body, Integer, Objects, SamplingFields, Texts
from jaxserve.structured_params import StructuredOutputsParams

_KEPT = ("all", {"type": "all"})  # reasoning of all turns: nothing is cleared


def _name_tier(value: str | None) -> str | None:
    return "default" if value == "standard_only" else value


class ThinkingOptions(Body):
    """Whether the model reasons before its answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None  # summarized: the reasoning itself, as it came


class OutputFormat(Body):
    """The format of the answer, which is enforced."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How long to reason, and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(Body):
    """What to leave out of the conversation: only what leaves everything in."""

    edits: Objects | None = None

    def refuse_edits(self) -> None:
        """Refuses the first edit that would leave something out; InvalidRequestError names it."""
        for at, edit in enumerate(self.edits or ()):
            clears_nothing = edit.get("type") == "clear_thinking_20251015" and edit.get("keep") in _KEPT
            if not clears_nothing or edit.keys() - {"type", "keep"}:
                message = f"{shorten(edit.get('type'))} is supported only as clear_thinking_20251015 that keeps 'all'"
                name = f"context_management.edits[{at}]"
                raise InvalidRequestError(f"{message}; send what the model should see", field=name, value=edit)


class MessageMetadata(Body):
    """Labels without effect."""

    user_id: str | None = None


class CountTokensRequest(SamplingFields):
    """A conversation whose prompt is counted. It may have all fields of one to answer."""

    messages: Objects
    system: str | Objects | None = None
    max_tokens: Integer | None = None
    stop_sequences: Texts | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    metadata: MessageMetadata | None = None  # without effect
    cache_control: dict[str, Any] | None = None  # without effect: prefixes are shared anyway
    service_tier: Annotated[  # type: ignore[assignment]  # two vocabularies: Anthropic's, and the server's own
        Literal["auto", "standard_only", "default", "flex", "priority"] | None, AfterValidator(_name_tier)
    ] = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None
    mcp_servers: Any = None
    speed: str | None = None
    thread: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    refused: ClassVar[dict[str, str]] = {
        "container": "the server runs no code",
        "diagnostics": "usage says what was read from the cache",
        "inference_geo": "the model runs where this server runs",
        "mcp_servers": "the server opens no address; send the tools",
        "speed": "send service_tier",
        "thread": "nothing is stored here; send the whole conversation",
        "user_profile_id": "send metadata.user_id",
        "workspace_id": "an API key says whose a request is",
        "n": "send the request several times",
        "stop": "send stop_sequences",
        "prompt_logprobs": "use /v1/completions",
        "stream_options": "usage is in every stream anyway",
        "return_token_ids": "use /v1/chat/completions",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "speed": ("standard",),
        "diagnostics": ({"previous_message_id": None},),
    }

    def read_form(self) -> StructuredOutputsParams | None:
        """Returns the form that the body asks for, in either field; None for plain text."""
        form = self.output_config.format if self.output_config is not None else None
        if form is None:
            return self.structured_outputs.to_params() if self.structured_outputs is not None else None
        if self.structured_outputs is not None:
            raise InvalidRequestError("conflicts with output_config.format; give only one", field="structured_outputs")
        return StructuredOutputsParams(json=form.schema_)


class MessagesRequest(CountTokensRequest):
    """A conversation to answer through Anthropic's Messages API. Nothing is stored."""

    max_tokens: Integer


class Message(BaseModel):
    """The answer. The tests check its blocks against the types of Anthropic's client."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: dict[str, Any]


class MessageTokens(BaseModel):
    """How long the prompt of a conversation is."""

    input_tokens: int


class MessagesErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class MessagesErrorBody(BaseModel):
    """The body of every error on these paths."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
