"""Writes a request's constraint as the text that llguidance compiles."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.features.grammars.gbnf import to_lark
from jaxserve.structured_params import LARK_LITERAL, StructuredOutputsParams

# The default whitespace between JSON tokens: one blank, or a line break and the indentation of eight levels by four. It
# is bounded, because some models write blanks until `max_tokens`. llguidance does not allow two such gaps in a row.
# `BlankLimit` bounds the gaps of a text together.
_BLANKS = r"\r?\n[ \t]{0,32}|[ \t]"
_LITERAL_OR_JSON = re.compile(rf"{LARK_LITERAL.pattern}|%json\s*")


def make_source(params: StructuredOutputsParams) -> str:
    """Returns the grammar of a constraint: Lark text, or llguidance's JSON list of grammars."""
    if params.kind == "grammar":
        return _bound_blanks(to_lark(str(params.grammar)))
    if params.kind == "choice":
        # One terminal is one automaton; as alternatives of a rule each text would use one of the parser's items.
        return _wrap({"lark_grammar": f"start: CHOICE\nCHOICE: {_list_texts(params)}"})
    if params.kind == "regex":
        return _wrap({"lark_grammar": f"start: {_write_regex(params)}"})
    schema = json.loads(str(params.json)) if params.kind == "json" else {"type": "object"}
    return _wrap({"json_schema": {**schema, "x-guidance": _write_options(params)}})


def _list_texts(params: StructuredOutputsParams) -> str:
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())


def _write_regex(params: StructuredOutputsParams) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(params.regex or '', 'dws')}/"  # "dws": \d, \w and \s mean ASCII; Rust's mean Unicode


def _write_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or _BLANKS}


def write_rule(params: StructuredOutputsParams, name: str) -> str:
    """Returns a constraint as the rule `name` of a Lark grammar, for a part of the output.

    Raises:
        InvalidRequestError: the grammar is malformed GBNF.
    """
    if params.kind == "grammar":
        return f"{name}: %lark {{\n{to_lark(str(params.grammar))}\n}}"
    if params.kind == "choice":
        return f"{name}: {name.upper()}\n{name.upper()}: {_list_texts(params)}"
    if params.kind == "regex":
        return f"{name}: {_write_regex(params)}"
    schema = json.loads(str(params.json)) if params.kind == "json" else {"type": "object"}
    if params.disable_any_whitespace or params.whitespace_pattern:
        schema |= {"x-guidance": _write_options(params)}  # else `make_source` adds the usual ones
    return f"{name}: %json {json.dumps(schema, ensure_ascii=False)}"


def _bound_blanks(grammar: str) -> str:
    """Returns a Lark grammar with bounded whitespace in each `%json` whose schema has no options of its own."""
    options = json.dumps({"whitespace_pattern": _BLANKS})
    decoder = json.JSONDecoder()
    pieces, copied, at = [], 0, 0
    while found := _LITERAL_OR_JSON.search(grammar, at):
        at = found.end()
        if not found[0].startswith("%json"):
            continue
        try:
            schema, end = decoder.raw_decode(grammar, at)
        except (ValueError, RecursionError):  # llguidance reports what is wrong
            break
        if schema is True or (isinstance(schema, dict) and "x-guidance" not in schema):
            pieces.append(f'{grammar[copied:at]}{{"x-guidance": {options}')
            copied = at + 1
            if schema is True:
                pieces.append("}")
                copied = end
            elif schema:
                pieces.append(", ")
        at = end
    return "".join((*pieces, grammar[copied:]))


def _wrap(grammar: dict[str, Any]) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)
