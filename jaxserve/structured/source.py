"""A request's constraint as the text that llguidance compiles."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.structured_params import StructuredOutputsParams


def make_source(params: StructuredOutputsParams) -> str:
    """Returns the grammar of a constraint: Lark text, or llguidance's JSON list of grammars."""
    if params.kind == "grammar":
        return str(params.grammar)
    if params.kind == "choice":
        # One terminal is one automaton; alternatives of a rule would each be an item of the parser, which are limited.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())
        return _wrap({"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"})
    if params.kind == "regex":
        from llguidance import regex_to_lark

        # \d, \w and \s mean ASCII, as in the engines that the names come from: in Rust they are Unicode's.
        return _wrap({"lark_grammar": f"start: /{regex_to_lark(params.regex or '', 'dws')}/"})
    schema = json.loads(str(params.json)) if params.kind == "json" else {"type": "object"}
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return _wrap({"json_schema": {**schema, "x-guidance": options} if options else schema})


def _wrap(grammar: dict[str, Any]) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)
