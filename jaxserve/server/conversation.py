"""A conversation to answer, whatever the protocol of its body; its engine request, and the parsers of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.media.items import MediaItem
from jaxserve.media.parts import ImagePart
from jaxserve.request import Request
from jaxserve.server.errors import ApiError
from jaxserve.server.images import NewImagesError
from jaxserve.server.prompts import make_params
from jaxserve.server.server_state import ServerState
from jaxserve.server.tools import (
    AnswerParser,
    ForcedCall,
    ToolSet,
    constrain_calls,
    has_call_grammar,
    make_answer_parser,
    needs_special_tokens,
)
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers.messages import check_messages

_USUAL_EFFORT = "medium"  # OpenAI's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Everything that a body asks of the model."""

    messages: Sequence[Mapping[str, Any]]  # as chat templates take them; `encode_chat` checks them
    images: Sequence[ImagePart] = ()  # that were taken from them
    image_options: Mapping[str, Any] | None = None  # of the image processor, for these
    tools: ToolSet | None = None  # and how they may be called
    call_form: StructuredOutputsParams | None = None  # of a named tool's call, which is the whole answer
    form: StructuredOutputsParams | None = None  # of an answer that is not forced to be a call
    params: Mapping[str, Any] = MappingProxyType({})  # sampling parameters by the names of `SamplingParams`
    template: str | None = None  # the body's own; None: the server's
    template_kwargs: Mapping[str, Any] | None = None  # variables of the template
    reasoning_effort: str | None = None
    shows_reasoning: bool = True
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool = False


def list_template_options(conversation: Conversation, state: ServerState) -> dict[str, Any]:
    """Returns the options of `encode_chat`.

    Raises:
        InvalidRequestError: the effort is given twice, or the body has its own template and the server does not allow
            that.
    """
    template, begins = conversation.template, conversation.add_generation_prompt
    effort, variables, defaults = conversation.reasoning_effort, dict(conversation.template_kwargs or {}), {}
    if template is not None and not state.config.serving.allow_request_chat_template:
        message = "this server does not render templates of requests (allow_request_chat_template)"
        raise InvalidRequestError(message, field="chat_template", value=template)
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        message = f"conflicts with reasoning_effort {effort!r}; give only one"
        raise InvalidRequestError(message, field="chat_template_kwargs.reasoning_effort")
    if effort == _USUAL_EFFORT:  # some clients always send it
        defaults = {"reasoning_effort": variables.pop("reasoning_effort")}
    return {
        "variables": variables,
        "defaults": {**state.template_variables, **defaults},
        "tools": conversation.tools.describe() if conversation.tools is not None else None,
        "chat_template": state.chat_template if template is None else template,
        "add_generation_prompt": not conversation.continue_final_message if begins is None else begins,
        "continue_final_message": conversation.continue_final_message,
        "render": state.preparation.choose_renderer(),
        "image_tokens": None if state.images is None else state.images.options.tokens,
    }


def encode_prompt(
    conversation: Conversation, state: ServerState, items: Sequence[MediaItem] | None = None
) -> list[int]:
    """Returns the token ids of a conversation's prompt.

    Args:
        items: its images, if they are loaded.

    Raises:
        NewImagesError: they are not.
        InvalidRequestError, TokenizerError: as `make_request`.
    """
    from jaxserve.tokenizers.chat import encode_chat

    _require_images(conversation, items)
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "This server has no tokenizer: it takes token ids only.", code="no_tokenizer")
    ids = encode_chat(tokenizer, conversation.messages, **list_template_options(conversation, state))[1]
    return ids if state.images is None or not items else state.images.expand(ids, items)


def _require_images(conversation: Conversation, items: Sequence[MediaItem] | None) -> None:
    """Raises NewImagesError if the images of a conversation are not loaded."""
    if conversation.images and items is None:
        raise NewImagesError(conversation.images, conversation.image_options)


def make_request(conversation: Conversation, state: ServerState, options: Mapping[str, Any]) -> Request:
    """Returns the engine request, with the prompt rendered and the parameters checked.

    Args:
        options: of `make_request_options`; and the conversation's `images`, if they are loaded.

    Raises:
        NewImagesError: they are not.
        InvalidRequestError: names the field.
        TokenizerError: there is no template, or it fails on these messages.
    """
    from jaxserve.tokenizers.chat import encode_chat

    engine, tools = state.engine, conversation.tools
    if tools is not None and tools.choice == "auto":
        _require_auto(state)
    form, template = conversation.form, list_template_options(conversation, state)
    tool_parser, reasoning_parser = _choose_parsers(conversation, state)
    is_written = has_call_grammar(tool_parser)  # forced calls are in the model's format; else JSON
    forced = conversation.call_form
    if forced is None and tools is not None and not is_written:
        forced = tools.structured_outputs()
    if form is not None and tools is not None and tools.is_forced:
        raise InvalidRequestError("conflicts with tool_choice; give only one", field="structured_outputs", value=None)
    is_free = _is_free_text(form)
    if is_free and tools is not None and tools.choice == "auto" and tools.is_strict:
        message = "conflicts with strict tools, as both say what a call looks like; give only one"
        raise InvalidRequestError(message, field="structured_outputs.structural_tag", value=None)
    if tools is not None and forced is None and not is_free:
        special = engine.tokenizer.special_tokens if engine.tokenizer is not None else {}
        parsers = str(tool_parser), reasoning_parser

        def read_prompt() -> str:
            return encode_chat(engine.tokenizer, conversation.messages, **template)[0]

        with _name_tools(form):
            form = constrain_calls(tools, *parsers, special, form=form, read_prompt=read_prompt) or form
    given = {**conversation.params, "structured_outputs": forced or form}
    if needs_special_tokens(reasoning_parser) or (needs_special_tokens(tool_parser) and forced is None):
        given["skip_special_tokens"] = False
    params = make_params(given, engine.defaults)
    _require_images(conversation, options.get("images"))
    with _name_tools(conversation.form) if form is not conversation.form else nullcontext():
        return engine.requests.make_chat(conversation.messages, params, **template, **options)


def make_parser(conversation: Conversation, request: Request, state: ServerState) -> AnswerParser:
    """Returns a parser for the text of one completion."""
    names, tools = _choose_parsers(conversation, state), conversation.tools
    if conversation.call_form is not None and tools is not None and tools.named is not None:
        return AnswerParser(tools=ForcedCall(tools.named), is_forced=True)
    continues, form = conversation.continue_final_message, conversation.form
    is_constrained = form is not None and not _is_free_text(form)
    begun = check_messages(conversation.messages[-1:])[0]["content"] if continues else None
    return make_answer_parser(*names, tools, prompt=request.prompt or "", begun=begun, is_constrained=is_constrained)


def _is_free_text(form: StructuredOutputsParams | None) -> bool:
    """Whether a form is of text that may reason and call tools, as structural tags are."""
    return form is not None and form.kind == "structural_tag"


def _choose_parsers(conversation: Conversation, state: ServerState) -> tuple[str | None, str | None]:
    """Returns the names of the parsers of calls and of reasoning."""
    return state.tool_parser if conversation.tools is not None else None, state.reasoning_parser


@contextmanager
def _name_tools(form: StructuredOutputsParams | None) -> Iterator[None]:
    """Names the tools in errors of a grammar that has their calls beside a form."""
    try:
        yield
    except InvalidRequestError as error:
        if form is None or not error.field.startswith("structured_outputs"):
            raise
        reason = str(error).removeprefix(f"{error.field}: ")
        message = f"with the tools, which may be called instead (tool_choice auto), as one grammar: {reason}"
        raise InvalidRequestError(message, field="structured_outputs") from error


def _require_auto(state: ServerState) -> None:
    """Refuses tool_choice "auto" where it is disabled, or where the model cannot write calls."""
    if not state.config.serving.enable_auto_tool_choice:
        message = "'auto' is disabled here (enable_auto_tool_choice); use required, none or a function's name"
    elif state.tool_parser is None:
        message = "'auto' needs a model that can call tools, and this one's chat template shows no calls; use required"
    else:
        return
    raise InvalidRequestError(message, field="tool_choice", value="auto")
