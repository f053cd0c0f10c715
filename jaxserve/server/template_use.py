"""The use that the server's chat template makes of what protocols bring, found by its text or by rendering it."""

from __future__ import annotations

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.server.server_state import ServerState
from jaxserve.tokenizers.pairs import PairTemplate

_MARKS = ("Mark one.", "Mark two.", "Mark three.", "Mark four.")
_SWITCHES = ("enable_thinking", "thinking")  # variables that switch reasoning on and off, by families' names
_pairs: dict[str, PairTemplate] = {}  # of the server's template
_known: dict[str, bool] = {}  # whether a template shows system turns; a server has one template


def list_variables(state: ServerState) -> frozenset[str]:
    """Returns the variables that the template reads; none where it is missing or broken, which rendering reports."""
    from jinja2 import TemplateError

    from jaxserve.tokenizers.template import find_variables

    template = _find_template(state)
    try:
        return find_variables(template) if template is not None else frozenset()
    except TemplateError:
        return frozenset()


def switch_reasoning(state: ServerState, *, is_on: bool) -> dict[str, bool]:
    """Returns the template's variables that switch reasoning on or off; {} where the model does so anyway.

    Raises:
        InvalidRequestError: the model always reasons, or never; names the field `thinking`.
    """
    variables = list_variables(state)
    found = {name: is_on for name in _SWITCHES if name in variables}
    if not found and is_on is not (state.reasoning_parser is not None):
        always = "never" if is_on else "always"
        message = f"this model {always} reasons: its chat template has no switch; leave it out, or send adaptive"
        raise InvalidRequestError(message, field="thinking.type", value="enabled" if is_on else "disabled")
    return found


def shows_system_turns(state: ServerState) -> bool:
    """Whether the template shows a system message between two others where it is, as a turn of its own."""
    from jaxserve.tokenizers.chat import encode_chat

    template, tokenizer = _find_template(state), state.engine.tokenizer
    if template is None or tokenizer is None:
        return False
    if template not in _known:
        roles = ("user", "assistant", "system", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        render = state.preparation.choose_renderer()
        try:
            text = encode_chat(tokenizer, messages, chat_template=template, render=render)[0]
        except (InvalidRequestError, TokenizerError):
            text = ""
        _known[template] = _has_turns(text)
    return _known[template]


def _has_turns(text: str) -> bool:
    """Whether all marks are in the text, in order, with something between them."""
    for mark in _MARKS:
        between, found, text = text.partition(mark)
        if not found or (mark != _MARKS[0] and not between.strip()):
            return False
    return True


def find_pair_template(state: ServerState, brought: str | None) -> PairTemplate | None:
    """Returns the template of a reranker's prompts: the request's, or the server's; None: the model's own.

    Raises:
        InvalidRequestError: this server renders no templates of requests.
        TokenizerError: it shows no pairs.
    """
    from jaxserve.tokenizers.pairs import require_pair_template

    if brought is not None and not state.config.serving.allow_request_chat_template:
        message = "this server does not render templates of requests (allow_request_chat_template)"
        raise InvalidRequestError(message, field="chat_template", value=brought)
    model, tokenizer = state.engine.model, state.engine.tokenizer
    text = brought or (state.chat_template if model.pooler.classes is not None and model.causal else None)
    if text is None or tokenizer is None:
        return None
    if brought is not None:
        return require_pair_template(text, tokenizer, state.preparation.choose_renderer())
    if text not in _pairs:
        _pairs[text] = require_pair_template(text, tokenizer, state.preparation.choose_renderer())
    return _pairs[text]


def _find_template(state: ServerState) -> str | None:
    tokenizer = state.engine.tokenizer
    return state.chat_template or (tokenizer.chat_template if tokenizer is not None else None)
