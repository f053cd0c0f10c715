"""Converts GBNF, the grammars of llama.cpp and vLLM's examples (`root ::= ...`), for llguidance."""

from __future__ import annotations

import re

from jaxserve.errors import InvalidRequestError

_MOST_CHARACTERS = 4096  # the converter's time grows with the square of the number of rules
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:))", re.MULTILINE)


def to_lark(grammar: str) -> str:
    """Returns a GBNF grammar as Lark; any other grammar unchanged.

    Raises:
        InvalidRequestError: the GBNF is malformed or too long to be converted.
    """
    if not _RULE.search(grammar) or _LARK.search(grammar):
        return grammar
    if len(grammar) > _MOST_CHARACTERS:
        message = f"as GBNF at most {_MOST_CHARACTERS} characters, got {len(grammar)}; write it as Lark"
        raise InvalidRequestError(message, field="structured_outputs.grammar", value=None)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the converter has no error type of its own
        message = f"is not valid GBNF: {error}; write it as Lark"
        raise InvalidRequestError(message, field="structured_outputs.grammar", value=None) from error
