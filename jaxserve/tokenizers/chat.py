"""Turns conversations into prompts with the checkpoint's own chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jaxserve.errors import InvalidRequestError, TokenizerError, shorten
from jaxserve.media.prompt import ImageTokens
from jaxserve.tokenizers.adaptation import SAMPLE_TOOLS, TemplateForm, adapt, make_key
from jaxserve.tokenizers.messages import (
    check_messages,
    check_tools,
    copy_json,
    count_images,
    rename_reasoning,
    wrap_arguments,
)
from jaxserve.tokenizers.renderer import render_apart
from jaxserve.tokenizers.template import name_variable

_READS_MEMBERS = re.compile(r"\|\s*items\b|\.items\(")  # of arguments, in templates that write each by its name
Renderer = Callable[..., str]  # with the arguments of `render_template`
_TYPES: Mapping[str, type] = {  # of variables of well-known templates, which would take any value for true
    "clear_thinking": bool,
    "enable_thinking": bool,
    "thinking": bool,
    "reasoning_effort": str,
    "date_string": str,
    "tools_in_user_message": bool,
}
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")  # and the named tokens


class ChatTokenizer(Protocol):
    """The part of a tokenizer that `encode_chat` uses."""

    named_tokens: Mapping[str, str]
    chat_template: str | None
    special_pattern: re.Pattern[str]

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool, escape: str) -> list[int]: ...


def encode_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    render: Renderer | None = None,
    variables: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    image_tokens: ImageTokens | None = None,
) -> tuple[str, list[int]]:
    """Returns a conversation as the prompt's text and its token ids.

    The template writes BOS if the model wants one, so none is added. A special token (`<|im_end|>`) that the caller's
    text spells stays plain text, in messages, calls, results, tools and options: only the template can end a turn.

    Args:
        tokenizer: has the template, its variables (bos_token, eos_token, ...) and the vocabulary.
        messages: dicts with `role` and `content`, a string or a list of `{"type": "text", "text": ...}`; also the
            messages that OpenAI's clients send back when tools are called.
        tools: what the model may call: `{"type": "function", "function": {"name", "description", "parameters"}}`.
        chat_template: Jinja source in place of the tokenizer's own template.
        add_generation_prompt: end with the beginning of the assistant's answer.
        continue_final_message: end with the content of the last message, which the model then continues; it must be
            the assistant's. Needs `add_generation_prompt=False`.
        render: replaces `render_apart`, for example by another `TemplateRenderer`'s method.
        variables: further variables of the template, which it must read; any JSON values.
        defaults: such variables for templates that read them.
        image_tokens: how the model's prompts show images, which messages may have then, as `take_images` leaves them.
            Each is one placeholder in the text and the ids (`ImageTokens.expand`). None: images are refused.

    Raises:
        InvalidRequestError: messages, tools or variables are malformed, the template does not read a variable, or it
            refuses the conversation.
        TokenizerError: there is no template, or it is broken.
    """
    template = tokenizer.chat_template if chat_template is None else chat_template
    if template is None:
        raise TokenizerError(
            "the tokenizer has none; give one with chat_template= in Python or --chat-template on the command line, "
            "or put a chat_template.jinja beside it",
            field="chat_template",
        )
    checked, described = check_messages(messages, reads_images=image_tokens is not None), check_tools(tools)
    if continue_final_message:
        _require_continuable(checked, add_generation_prompt)
    checked = adapt(checked, make_form(template, tokenizer.named_tokens, render))
    if "<|channel|>" in template:
        checked = rename_reasoning(checked)
    if _READS_MEMBERS.search(template):
        checked = wrap_arguments(checked)
    given = check_variables({**(defaults or {}), **(variables or {})}, tokenizer.named_tokens)
    texts = list(_list_texts([checked, described, given]))
    pattern = tokenizer.special_pattern
    escape = ""
    if any(map(pattern.search, texts)):
        escape = choose_unused(template, texts)
        checked, described, given = (protect(value, pattern, escape) for value in (checked, described, given))
    end = ""
    if continue_final_message:  # a character that occurs nowhere else marks the end of the content
        end = choose_unused(template + escape, texts)
        checked[-1]["content"] += end
    values = {**tokenizer.named_tokens, **given, "add_generation_prompt": add_generation_prompt}
    text = (render or render_apart)(template, checked, values, tools=described, must_read=list(variables or ()))
    if end:
        text = _cut_at(text, end, f"messages[{len(checked) - 1}].content")
    if image_tokens is not None and (num_images := count_images(checked)):
        require_special(image_tokens, pattern)
        text = image_tokens.write(text, num_images)
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=True, escape=escape)
    return text.replace(escape, "") if escape else text, ids


def require_special(tokens: ImageTokens, pattern: re.Pattern[str]) -> None:
    """Raises TokenizerError unless the texts of an image are special tokens, which no caller can spell."""
    for text in (tokens.mark, tokens.placeholder):
        if not pattern.fullmatch(text):
            raise TokenizerError(f"has no special token {text!r}, which stands for images", field="tokenizer")


def make_form(template: str, named_tokens: Mapping[str, str], render: Renderer | None = None) -> TemplateForm:
    """Returns the form of conversations that a template shows; the arguments are as in `encode_chat`."""
    variables = {**named_tokens, "add_generation_prompt": False}

    def render_sample(messages: list[dict[str, Any]]) -> str:
        return (render or render_apart)(template, messages, variables, tools=SAMPLE_TOOLS)

    return TemplateForm(make_key(template, variables), render_sample)


def _require_continuable(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> None:
    field = f"messages[{len(messages) - 1}]"
    if add_generation_prompt:
        message = "contradicts add_generation_prompt, which begins a new answer; set add_generation_prompt to false"
        raise InvalidRequestError(message, field="continue_final_message", value=True)
    if messages[-1]["role"] != "assistant":
        message = "must be 'assistant' with continue_final_message, which continues an answer"
        raise InvalidRequestError(message, field=f"{field}.role", value=messages[-1]["role"])
    if "tool_calls" in messages[-1]:
        message = "cannot be continued; continue_final_message continues content"
        raise InvalidRequestError(message, field=f"{field}.tool_calls")


def _cut_at(text: str, end: str, field: str) -> str:
    at = text.rfind(end)
    if at < 0:
        message = "is not written by the chat template, so continue_final_message cannot continue it"
        raise InvalidRequestError(message, field=field)
    return text[:at].replace(end, "")


def check_variables(given: Mapping[str, Any], named_tokens: Mapping[str, str]) -> dict[str, Any]:
    """Returns a copy of variables that a caller sets.

    Raises:
        InvalidRequestError: one is no JSON value, has another type than its well-known templates expect, or is set by
            other means.
    """
    checked = {}
    for name, value in given.items():
        field = name_variable(name)
        if name in _OWN_VARIABLES or name in named_tokens:
            raise InvalidRequestError("cannot be set here: it has a field or token of its own", field=field)
        if name in _TYPES and not isinstance(value, _TYPES[name]):
            message = f"must be of type {_TYPES[name].__name__}, got {shorten(value)}"
            raise InvalidRequestError(message, field=field, value=value)
        checked[name] = copy_json(value, field)
    return checked


def _list_texts(value: Any) -> Iterator[str]:
    """Yields every string inside a JSON value, keys of objects included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def choose_unused(template: str, texts: Sequence[str]) -> str:
    """Returns a character of the private use area that occurs in neither the template nor the texts."""
    used = set(template).union(*texts)
    for code in range(0xE000, 0xF900):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError(
        "uses every character of the private use area, one of which is needed as a mark; leave one out",
        field="messages",
    )


def protect(value: Any, pattern: re.Pattern[str], escape: str) -> Any:
    """Returns a JSON value in which `escape` follows each character of every special token's text."""
    if isinstance(value, dict):
        return {protect(key, pattern, escape): protect(item, pattern, escape) for key, item in value.items()}
    if isinstance(value, list):
        return [protect(item, pattern, escape) for item in value]
    if not isinstance(value, str):
        return value
    protected = pattern.sub(lambda match: escape.join([*match[0], ""]), value)
    if match := pattern.search(protected):
        raise InvalidRequestError(
            f"holds the special token {match[0]!r}, one character that cannot be kept as plain text",
            field="messages",
        )
    return protected
