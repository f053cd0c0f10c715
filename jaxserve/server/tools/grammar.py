"""The grammar of an answer that either is a call in the model's own format or has the form that a request asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars.source import write_rule
from jaxserve.server.tools.spec import ToolSet
from jaxserve.structured_params import StructuredOutputsParams

_Mark = Callable[[str], str]  # a text of the format as a term of the grammar


def allow_calls(
    form: StructuredOutputsParams, tools: ToolSet, parser: str, special_tokens: Mapping[str, int]
) -> StructuredOutputsParams:
    """Returns the constraint of an answer that calls tools in a format or has a form. Arguments match their schemas.

    Args:
        parser: the name of the format's parser.
        special_tokens: those of the tokenizer: text to id.

    Raises:
        InvalidRequestError: there is no grammar for the format, or form and tools are too large together.
    """
    if parser not in _CALLS:
        message = f"calls in the format {parser} have none; use tool_choice none or required"
        raise InvalidRequestError(message, field="structured_outputs")

    def mark(text: str) -> str:
        return f"<[{special_tokens[text]}]>" if text in special_tokens else json.dumps(text)

    rules = write_rule(form, "form"), _CALLS[parser](tools, mark)
    return StructuredOutputsParams(grammar="\n".join(("start: form | calls", *rules, "")))


def _write_hermes(tools: ToolSet, mark: _Mark) -> str:
    call = f'call: {mark("<tool_call>")} "\\n" %json {json.dumps(tools.make_call_schema("arguments"))} "\\n" '
    return f"{_repeat(tools, '"\\n"')}\n{call}{mark('</tool_call>')}"


def _write_llama(tools: ToolSet, mark: _Mark) -> str:
    return f"{_repeat(tools, '"; "')}\ncall: %json {json.dumps(tools.make_call_schema('parameters'))}"


def _write_mistral(tools: ToolSet, mark: _Mark) -> str:
    """Older models write an array of objects, newer ones each call by its name."""
    opener, separator = mark("[TOOL_CALLS]"), mark("[ARGS]")
    array = json.dumps(tools.make_array_schema("arguments"))
    named = " | ".join(
        f"{json.dumps(tool.name)} {separator}? %json {json.dumps(tool.arguments_schema)}" for tool in tools.tools
    )
    more = f" ({opener} call)*" if tools.parallel else ""
    return f'calls: {opener} (" "? %json {array} | call{more})\ncall: {named}'


def _repeat(tools: ToolSet, separator: str) -> str:
    return f"calls: call ({separator} call)*" if tools.parallel else "calls: call"


_CALLS: Mapping[str, Callable[[ToolSet, _Mark], str]] = {
    "hermes": _write_hermes,
    "llama3_json": _write_llama,
    "mistral": _write_mistral,
}
