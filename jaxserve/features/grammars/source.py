"""Writes a request's constraint as the text that llguidance compiles."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.features.grammars.gbnf import to_lark
from jaxserve.features.grammars.rules import BLANKS, list_texts, write_options, write_regex
from jaxserve.features.grammars.structural_tags import write_structural_tag
from jaxserve.structured_checks import LARK_LITERAL
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer

_LITERAL_OR_JSON = re.compile(rf"{LARK_LITERAL.pattern}|%json\s*")


def make_source(params: StructuredOutputsParams, tokenizer: Tokenizer) -> str:
    """Returns the grammar of a constraint: Lark text, or llguidance's JSON list of grammars.

    Args:
        tokenizer: a structural tag may name its special tokens.

    Raises:
        InvalidRequestError: the constraint is malformed GBNF, or a structural tag that no grammar here can hold.
    """
    if params.kind == "grammar":
        return _bound_blanks(to_lark(str(params.grammar)))
    if params.kind == "structural_tag":
        return _bound_blanks(write_structural_tag(str(params.structural_tag), tokenizer))
    if params.kind == "choice":
        # One terminal is one automaton; as alternatives of a rule each text would use one of the parser's items.
        return _wrap({"lark_grammar": f"start: CHOICE\nCHOICE: {list_texts(params)}"})
    if params.kind == "regex":
        return _wrap({"lark_grammar": f"start: {write_regex(str(params.regex))}"})
    schema = json.loads(str(params.json)) if params.kind == "json" else {"type": "object"}
    return _wrap({"json_schema": {**schema, "x-guidance": write_options(params)}})


def _bound_blanks(grammar: str) -> str:
    """Returns a Lark grammar with bounded whitespace in each `%json` whose schema has no options of its own."""
    options = json.dumps({"whitespace_pattern": BLANKS})
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
