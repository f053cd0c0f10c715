"""Makes an engine request of a chat request's body, and the parser of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request
from jaxserve.server.prompts import check_length, list_limits, read_form, template_options
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.server_state import ServerState
from jaxserve.server.tools import AnswerParser, ToolSet, make_answer_parser, needs_special_tokens, read_tools


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat request, ready for the engine."""

    request: Request
    tools: ToolSet | None
    tool_parser: str | None
    reasoning_parser: str | None

    def make_parser(self) -> AnswerParser | None:
        """Returns a parser for the text of one completion; None when all of it is content."""
        if self.tools is None and self.reasoning_parser is None:
            return None
        is_constrained = self.request.grammar is not None
        prompt = self.request.prompt or ""
        return make_answer_parser(
            self.tool_parser, self.reasoning_parser, self.tools, prompt=prompt, is_constrained=is_constrained
        )


def list_names(body: ChatCompletionRequest) -> dict[str, str]:
    """Returns the body's names of the engine's fields."""
    names = {name: f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or ()}
    names |= {"logprobs": "top_logprobs", "prompt": "messages"}
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    if body.response_format is not None:
        names["structured_outputs.json"] = "response_format.json_schema.schema"
    elif body.structured_outputs is None:
        names["structured_outputs.json"] = "tools"  # their schemas constrain a forced call
    return names


def read_conversation(body: ChatCompletionRequest, state: ServerState, options: dict[str, Any]) -> Conversation:
    """Returns the conversation with its prompt rendered and its parameters checked.

    Raises:
        InvalidRequestError: names the field.
        TokenizerError: there is no template, or it fails on these messages.
    """
    engine = state.engine
    check_length([body.messages, body.tools], state, "messages", cuts=body.truncate_prompt_tokens is not None)
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    if tools is not None and tools.choice == "auto":
        _require_auto(body, state)
    form = read_form(body)
    forced = tools.structured_outputs() if tools is not None else None
    if forced is not None and form is not None:
        raise InvalidRequestError("conflicts with tool_choice; give only one", field="response_format", value=None)
    more: dict[str, Any] = {"structured_outputs": forced or form, **list_limits(body)}
    more["max_tokens"] = engine.defaults.limit_tokens(_read_max_tokens(body))
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    reasoning = state.reasoning_parser
    tool_parser = state.tool_parser if tools is not None else None
    if needs_special_tokens(reasoning) or (needs_special_tokens(tool_parser) and forced is None):
        more["skip_special_tokens"] = False
    params = body.to_sampling_params(engine.defaults.params, **more)
    shown = tools.describe() if tools is not None else None
    request = engine.requests.make_chat(body.messages, params, tools=shown, **template_options(body, state), **options)
    return Conversation(request, tools, tool_parser, reasoning)


def _require_auto(body: ChatCompletionRequest, state: ServerState) -> None:
    """Refuses tool_choice "auto" where it is disabled, or where the model cannot write calls."""
    if not state.config.serving.enable_auto_tool_choice:
        message = "'auto' is disabled here (enable_auto_tool_choice); use required, none or a function's name"
    elif state.tool_parser is None:
        message = "'auto' needs a model that can call tools, and this one's chat template shows no calls; use required"
    else:
        return
    raise InvalidRequestError(message, field="tool_choice", value=body.tool_choice)


def _read_max_tokens(body: ChatCompletionRequest) -> int | None:
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
        message = f"conflicts with max_completion_tokens {both[1]}"
        raise InvalidRequestError(message, field="max_tokens", value=both[0])
    return both[0] if both[0] is not None else both[1]
