"""Grammars in GBNF, as vLLM's examples have them."""

from __future__ import annotations

import time

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler
from jaxserve.features.grammars.gbnf import to_lark
from jaxserve.structured_params import StructuredOutputsParams

SQL = """
root ::= selectStatement
selectStatement ::= "SELECT " column-name " from " ("t_1" | "t_2") [0-9]*
column-name ::= "col_1 " | "col_2 "
"""


def test_gbnf_becomes_lark_that_compiles(compiler: GrammarCompiler) -> None:
    lark = to_lark(SQL)
    assert "start: " in lark and "::=" not in lark
    compiler.compile(StructuredOutputsParams(grammar=SQL))


@pytest.mark.parametrize(
    "grammar", ['start: "a ::= b"', 'start: A\nA: "x"', "%llguidance {}\nstart: A\nA: /x/", "?", ""]
)
def test_what_is_not_gbnf_stays(grammar: str) -> None:
    assert to_lark(grammar) == grammar


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a',
        'other ::= "a"',
        "root ::= missing",
        "root ::= " + "(" * 4000,
        'root ::= "\\q"',
        "a ::= 'b'\n" * 500,
    ],
)
def test_malformed_gbnf_is_named_soon(grammar: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.grammar: .*Lark"):
        to_lark(grammar)
    assert time.process_time() - begin < 5


def test_the_longest_grammar_takes_no_minute() -> None:
    rules = [f"r{n} ::= r{n + 1}" for n in range(280)]
    grammar = "\n".join(["root ::= r0", *rules, 'r280 ::= "x"'])
    begin = time.process_time()
    assert len(grammar) <= 4096 and "start" in to_lark(grammar) and time.process_time() - begin < 20


@pytest.mark.parametrize("head", ["start: rule", "%llguidance {}\nstart: rule"])
def test_lark_in_which_a_line_looks_like_gbnf_stays(head: str) -> None:
    grammar = f"{head}\nrule: /(?x)\n  name ::= x/\n"
    assert to_lark(grammar) == grammar
