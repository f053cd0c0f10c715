"""Conversations to prompts, by the checkpoint's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError, TokenizerError, shorten
from jaxserve.tokenizers.template import render_template
from jaxserve.tokenizers.tokenizer import Tokenizer, require_text

# Not every name: some templates write '<|' + role + '|>', and a role "end" would then end the turn.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
OPTIONS: Mapping[str, type] = {  # variables of well-known templates that a caller may set
    "enable_thinking": bool,
    "thinking": bool,
    "reasoning_effort": str,
    "date_string": str,
    "tools_in_user_message": bool,
}
_TEXT_FIELDS = ("name", "reasoning_content")


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    **options: bool | str,
) -> tuple[str, list[int]]:
    """Returns a conversation as the prompt's text and token ids.

    The template writes BOS if the model wants one, so none is added. Text in `messages` that spells a special token
    (`<|im_end|>`) stays plain text: nobody ends a turn but the template.

    Args:
        tokenizer: gives the template, its variables bos_token, eos_token, ..., and the ids.
        messages: dicts with `role` and `content`: a string, or a list of `{"type": "text", "text": ...}`.
        chat_template: Jinja source to take instead of the tokenizer's own.
        add_generation_prompt: end with the beginning of the assistant's answer.
        options: further variables of the template, of `OPTIONS`.

    Raises:
        InvalidRequestError: messages or options are malformed, or the template refuses the conversation.
        TokenizerError: there is no template, or it is broken.
    """
    template = tokenizer.chat_template if chat_template is None else chat_template
    if template is None:
        raise TokenizerError(
            "the tokenizer has none; pass chat_template=, or put a chat_template.jinja beside it",
            field="chat_template",
        )
    checked = check_messages(messages)
    _check_options(options)
    escape = _choose_escape(tokenizer.special_pattern, template, [*checked, options])
    if escape:
        checked = [_protect(message, tokenizer.special_pattern, escape) for message in checked]
        options = _protect(options, tokenizer.special_pattern, escape)
    variables = {**tokenizer.named_tokens, **options, "add_generation_prompt": add_generation_prompt}
    text = render_template(template, checked, variables)
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=True, escape=escape)
    return text.replace(escape, "") if escape else text, ids


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **options: bool | str,
) -> str:
    """Returns a conversation as text. See `encode_chat`, which also keeps special tokens out of the messages."""
    checked = check_messages(messages)
    _check_options(options)
    variables = {"bos_token": bos_token, "eos_token": eos_token, **options}
    return render_template(template, checked, {**variables, "add_generation_prompt": add_generation_prompt})


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns a copy of the messages with their content as one string each; parts are joined by newlines.

    Raises:
        InvalidRequestError: there is none, or one is malformed or holds something other than text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequestError(
            f"must be a list of at least one message, got {shorten(messages)}", field="messages", value=messages
        )
    return [_check_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _check_message(message: Any, field: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"must be an object with 'role' and 'content', got {shorten(message)}", field=field, value=message
        )
    for key in message:
        if key not in ("role", "content", *_TEXT_FIELDS):
            raise InvalidRequestError(
                f"{shorten(key)} is not supported; role, content, {' and '.join(_TEXT_FIELDS)} are",
                field=field,
                value=key,
            )
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"must be one of {', '.join(sorted(ROLES))}, got {shorten(role)}", field=f"{field}.role", value=role
        )
    checked = {"role": role, "content": _join_content(message.get("content"), f"{field}.content")}
    for name in _TEXT_FIELDS:
        if message.get(name) is not None:
            checked[name] = require_text(message[name], f"{field}.{name}")
    return checked


def _join_content(content: Any, field: str) -> str:
    if not isinstance(content, list):
        return require_text(content, field)
    texts = []
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise InvalidRequestError(
                f"only parts of type 'text' are supported, got {shorten(part)}", field=f"{field}[{at}]", value=part
            )
        texts.append(require_text(part.get("text"), f"{field}[{at}].text"))
    return "\n".join(texts)


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            raise InvalidRequestError(
                f"not a variable that a caller may set; known: {', '.join(OPTIONS)}", field=name, value=value
            )
        if not isinstance(value, OPTIONS[name]):
            raise InvalidRequestError(
                f"must be of type {OPTIONS[name].__name__}, got {shorten(value)}", field=name, value=value
            )
        if isinstance(value, str):
            require_text(value, name)


def _choose_escape(pattern: re.Pattern[str], template: str, inputs: Sequence[Mapping[str, bool | str]]) -> str:
    """Returns a character of the private use area that occurs nowhere, or "" when no input spells a special token."""
    texts = [value for values in inputs for value in values.values() if isinstance(value, str)]
    if not any(map(pattern.search, texts)):
        return ""
    used = set(template).union(*texts)
    for code in range(0xE000, 0xF900):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError(
        "spells special tokens and uses every character of the private use area; leave one of them out",
        field="messages",
    )


def _protect(values: Mapping[str, Any], pattern: re.Pattern[str], escape: str) -> dict[str, Any]:
    """Returns the values with the escape behind each character of a special token's text."""

    def split(match: re.Match[str]) -> str:
        return escape.join([*match[0], ""])

    protected = {key: pattern.sub(split, value) if isinstance(value, str) else value for key, value in values.items()}
    for value in protected.values():
        if isinstance(value, str) and (match := pattern.search(value)):
            raise InvalidRequestError(
                f"holds the special token {match[0]!r}, one character that cannot be kept as plain text",
                field="messages",
            )
    return protected
