"""Writes constraints as rules of a Lark grammar, or as parts of them."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.features.grammars.gbnf import to_lark
from jaxserve.structured_params import StructuredOutputsParams

# The default whitespace between JSON tokens: one blank, or a line break and the indentation of eight levels by four. It
# is bounded, because some models write blanks until `max_tokens`. llguidance does not allow two such gaps in a row.
# `BlankLimit` bounds the gaps of a text together.
BLANKS = r"\r?\n[ \t]{0,32}|[ \t]"


def write_rule(params: StructuredOutputsParams, name: str) -> str:
    """Returns a constraint as the rule `name` of a Lark grammar, for a part of the output.

    Raises:
        InvalidRequestError: the grammar is malformed GBNF.
    """
    if params.kind == "grammar":
        return f"{name}: %lark {{\n{to_lark(str(params.grammar))}\n}}"
    if params.kind == "choice":
        return f"{name}: {name.upper()}\n{name.upper()}: {list_texts(params)}"
    if params.kind == "regex":
        return f"{name}: {write_regex(str(params.regex))}"
    schema = json.loads(str(params.json)) if params.kind == "json" else {"type": "object"}
    if params.disable_any_whitespace or params.whitespace_pattern:
        schema |= {"x-guidance": write_options(params)}  # else `make_source` adds the usual ones
    return f"{name}: %json {json.dumps(schema, ensure_ascii=False)}"


def list_texts(params: StructuredOutputsParams) -> str:
    """Returns the texts of a choice as alternatives."""
    return " | ".join(map(quote, params.choice or ()))


def quote(text: str) -> str:
    """Returns a text as a literal of Lark, which takes JSON's but for the character U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_regex(regex: str) -> str:
    """Returns a regular expression in the syntax of Lark."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex, 'dws')}/"  # "dws": \d, \w and \s mean ASCII; Rust's mean Unicode


def write_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """Returns llguidance's options of the whitespace in JSON."""
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or BLANKS}
