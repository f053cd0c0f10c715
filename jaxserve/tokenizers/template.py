"""Chat templates: Jinja that came with a downloaded model, rendered in a sandbox.

A template cannot reach Python's internals, files or the network, and its output is bounded. It can still burn processor
time and memory, so it is rendered in processes that can be killed (`renderer.py`); this file is their program, by
`prepare`.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jaxserve.errors import InvalidRequestError, TokenizerError, shorten

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_RENDERED_CHARS = 2**24
_MAX_EXPONENT = 1024
_ERRORS = {kind.__name__: kind for kind in (InvalidRequestError, TokenizerError)}


def render_template(
    template: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    *,
    tools: list[dict[str, Any]] | None = None,
    must_read: Sequence[str] = (),
) -> str:
    """Returns the text that a template makes of messages and tools.

    Args:
        must_read: the names of variables without which the template would be the same, if it did not read them.

    Raises:
        InvalidRequestError: the template refuses the messages or does not read a variable, or the text is too long.
        TokenizerError: the template is not valid Jinja, breaks the sandbox's rules, or fails.
    """
    compiled = _compile(template)
    require_read(template, must_read)
    chunks: list[str] = []
    size = 0
    try:
        for chunk in compiled.generate({"documents": None, **variables, "messages": messages, "tools": tools}):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_RENDERED_CHARS:
                break
    except _RefusedError as error:
        raise InvalidRequestError(f"refused by the chat template: {error}", field="messages") from error
    except Exception as error:  # a template is foreign code
        raise TokenizerError(
            f"the template failed on these messages: {type(error).__name__}: {shorten(str(error))}",
            field="chat_template",
        ) from error
    if size > MAX_RENDERED_CHARS:
        raise InvalidRequestError(
            f"the rendered conversation is longer than {MAX_RENDERED_CHARS} characters", field="messages"
        )
    return "".join(chunks)


def require_read(template: str, names: Sequence[str]) -> None:
    """Raises InvalidRequestError for the first of these variables that a valid template does not read."""
    read = find_variables(template) if names else frozenset()
    for name in names:
        if name not in read:
            known = ", ".join(sorted(each for each in read if not each.endswith("_token"))) or "none"
            message = f"the chat template does not read it; its variables are {shorten(known)}"
            raise InvalidRequestError(message, field=name_variable(name))


def name_variable(name: str) -> str:
    """Returns the name of a variable's field, as Python's arguments and bodies have it."""
    return f"chat_template_kwargs.{shorten(name)[1:-1]}"


@functools.lru_cache(maxsize=16)
def find_variables(template: str) -> frozenset[str]:
    """Returns the names that a valid template reads and does not set itself, but for messages and tools."""
    from jinja2 import meta

    found = meta.find_undeclared_variables(_make_environment().parse(template))
    return frozenset(found - {"messages", "tools", "add_generation_prompt"})


def prepare(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Compiles the templates in `options["templates"]`; returns the function that answers a worker's jobs.

    A job holds the arguments of `render_template`; `read_reply` reads its reply.
    """
    for template in options["templates"]:
        with contextlib.suppress(TokenizerError):  # reported with the first job
            _compile(template)
    return _answer


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": render_template(**job)}
    except tuple(_ERRORS.values()) as error:
        message = str(error).removeprefix(f"{error.field}: ")
        return {"error": type(error).__name__, "message": message, "field": error.field}


def read_reply(reply: Mapping[str, Any]) -> str:
    """Returns the text of a reply.

    Raises:
        InvalidRequestError, TokenizerError: as `render_template` raised it.
    """
    if "error" in reply:
        raise _ERRORS[reply["error"]](reply["message"], field=reply["field"])
    return reply["text"]


class _RefusedError(Exception):
    """The template called `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _RefusedError(shorten(str(message)))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without HTML escapes, as transformers' filter does; Jinja's own `tojson` escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    from jinja2 import TemplateError

    try:
        return _make_environment().from_string(template)
    except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise TokenizerError(
            f"the template is not valid Jinja: {type(error).__name__}: {shorten(str(error))}", field="chat_template"
        ) from error


@functools.cache
def _make_environment() -> Environment:
    """Returns the Jinja environment that chat templates expect, sandboxed and without a loader."""
    from jinja2 import ext, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(ext.Extension):
        """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> nodes.Scope:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class ChatEnvironment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            """Refuses operations with huge results, such as "a" * 10**10."""
            for value, times in ((left, right), (right, left)) if operator == "*" else ():
                size = len(value) * times if isinstance(value, str | list | tuple) else 0
                if size > MAX_RENDERED_CHARS:
                    raise SecurityError(f"a sequence of {size} elements")
            if operator == "**" and abs(right) > _MAX_EXPONENT:
                raise SecurityError(f"an exponent of {right}")
            return super().call_binop(context, operator, left, right)

    environment = ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment
