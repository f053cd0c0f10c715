"""Makes a chat template pay for its work: refuses unknown operations and rewrites the syntax tree so that others pay.

The listed operations take time and memory linear in their operands, and their results are at most a small multiple of
them. A filter around each operand, or around the result where that is no smaller, pays for the work; around a loop's
iterable it pays for all steps before the first one. A unit is a few nanoseconds. The filters are in `frugal.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Set
from typing import Any

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

# The filters, under names that no template can spell: pay for all inside a value, each element, each step, ...
READ, SCAN, LOOP, SPEND, KEY, NUMBER = "<read>", "<scan>", "<loop>", "<spend>", "<key>", "<number>"
CHAR = 4  # units for a character that is written out
_NODE, _LOOKUP, _CALL, _TIME = 64, 512, 2048, 16384  # units: the most expensive operation of each kind
_FORMAT = re.compile(r"[^0-9]{0,64}")  # formats of strftime_now
_MAX_TERMS = 32  # a + b + c copies a twice
_MAX_TEXT = 64  # characters of a constant argument
_MAX_NEW = 16  # characters of replacement text
_MAX_NUMBER = 8  # constant argument: indentation multiplies

# Filters by what they pay for: their operand; its elements as well; their result; nothing; each element that passes.
# The lazy ones do their work inside a consumer, so they must stand in one.
_READERS = {
    "capitalize", "dictsort", "float", "int", "join", "lower", "replace", "safe", "sort", "string", "trim", "upper",
}  # fmt: skip
_ITERATORS = {"dictsort", "join", "sort"}
_MAKERS = {"list", "tojson"}
_LOOKERS = {"count", "d", "default", "first", "last", "length"}
_LAZY = {"items", "map", "reject", "rejectattr", "select", "selectattr"}
_CONSUMERS = {"first", "join", "list"}
_TESTS = {
    "!=", "==", "boolean", "defined", "eq", "equalto", "false", "float", "in", "integer", "iterable", "mapping", "ne",
    "none", "number", "sequence", "string", "true", "undefined",
}  # fmt: skip
_METHODS = {
    "capitalize", "endswith", "find", "get", "items", "keys", "lower", "lstrip", "replace", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "title", "upper", "values",
}  # fmt: skip
_FUNCTIONS = {"namespace", "raise_exception", "range", "strftime_now"}
_HIDDEN = {"caller", "kwargs", "self", "super", "varargs"}  # Jinja's own variables, never paid for
_PLAIN = (
    nodes.And, nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.CondExpr, nodes.Continue, nodes.Getattr, nodes.If,
    nodes.Keyword, nodes.NSRef, nodes.Name, nodes.Neg, nodes.Not, nodes.Operand, nodes.Or, nodes.Pair, nodes.Scope,
    nodes.Slice,
)  # fmt: skip


class CostlyTemplateError(Exception):
    """The template holds an unlisted operation; the message names it and its line."""


def make_pay(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Rewrites a template's syntax tree in place and returns it.

    Raises:
        CostlyTemplateError: it holds something whose cost is not known.
    """
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for name in macros.keys() & environment.globals.keys():  # called before its definition, it is the global
        raise _refuse(macros[name], f"a macro {name}()")
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    rewriter = _Rewriter(macros.keys() - assigned, _FUNCTIONS - assigned)
    tree.body[:] = [rewriter.visit(child) for child in tree.body]
    return tree


class _Rewriter(NodeTransformer):
    """Makes a template pay. Each method returns the replacement of a node, with its children rewritten."""

    def __init__(self, macros: Set[str], functions: Set[str]) -> None:
        """Takes the names that can be called and that the template never assigns."""
        self._macros, self._functions = macros, functions
        self._price = 0  # one run of the body being rewritten, without inner bodies

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Rewrites the children of a node whose own cost is fixed; refuses all other nodes."""
        is_hidden = isinstance(node, nodes.Name) and node.name in _HIDDEN
        if type(node) not in _PLAIN or is_hidden:
            raise _refuse(node, f"the variable {node.name}" if is_hidden else type(node).__name__)
        self._price += _LOOKUP if isinstance(node, nodes.Getattr) else 0
        return self._rewrite_children(node)

    def visit_Const(self, node: nodes.Const | nodes.TemplateData) -> nodes.Node:
        """Literals are paid for where they stand."""
        text = node.data if isinstance(node, nodes.TemplateData) else node.value
        self._price += CHAR * len(text) if isinstance(text, str) else 0
        return node

    visit_TemplateData = visit_Const

    def _pay_for_texts(self, node: nodes.Output | nodes.Concat) -> nodes.Node:
        self._price += _NODE
        node.nodes = [self._pay(READ, self.visit(child)) for child in node.nodes]
        return node

    visit_Output = visit_Concat = _pay_for_texts

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """All steps are paid for before the first one; those of a generator one by one."""
        if node.recursive:
            raise _refuse(node, "a recursive loop")
        iterable, _ = self._visit_operand(node.iter)
        node.else_ = [self.visit(child) for child in node.else_]
        tests = [] if node.test is None else [node.test]
        price = self._visit_body(node.body) + self._visit_body(tests)
        node.test = tests[0] if tests else None
        node.iter = self._pay(LOOP, iterable, price)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Each call pays before its body runs, so that recursion ends too."""
        price = self._visit_body(node.defaults) + self._visit_body(node.body)
        self._price += _CALL
        node.body.insert(0, nodes.ExprStmt(self._pay(SPEND, nodes.Const(None), price), lineno=node.lineno))
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        """Allows calls of macros, of some functions, and of some methods of strings and objects, by name only."""
        called = node.node
        self._price += _CALL
        if isinstance(called, nodes.Getattr) and called.attr in _METHODS:
            self._visit_arguments(node, called.attr)
            called.node = self._pay(SCAN, self.visit(called.node))
            return node
        name = called.name if isinstance(called, nodes.Name) else getattr(called, "attr", "what was looked up")
        if not isinstance(called, nodes.Name) or name not in self._macros | self._functions:
            raise _refuse(node, f"a call of {name}")
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _refuse(node, "a call with *")
        return self._visit_function(node, name) if name in self._functions else self._rewrite_children(node)

    def _visit_function(self, node: nodes.Call, name: str) -> nodes.Node:
        if node.args if name == "namespace" else node.kwargs:
            raise _refuse(node, f"{name} with such arguments")
        if name == "strftime_now":
            self._price += _TIME
            if not all(isinstance(value, nodes.Const) and _FORMAT.fullmatch(str(value.value)) for value in node.args):
                raise _refuse(node, "strftime_now with a width, or a format that is not constant")
        self._rewrite_children(node)
        if name == "raise_exception":
            node.args = [self._pay(READ, argument) for argument in node.args]
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name in _LAZY:
            raise _refuse(node, f"{node.name} outside of a loop, a join or a list")
        return self._visit_filter(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        if node.name not in _TESTS:
            raise _refuse(node, f"is {node.name}")
        self._visit_arguments(node, node.name)
        node.node = self.visit(node.node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """A comparison with a constant is free, since the constant bounds the work; a search for a constant is not."""
        self._price += _NODE
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            side.expr = self.visit(side.expr)
        for left, right in itertools.pairwise(sides):
            if _is_constant(right.expr):
                continue
            if right.op in ("in", "notin"):
                if _is_constant(left.expr) and not _is_small(left.expr, _MAX_TEXT):
                    raise _refuse(node, "a search for a long text")
                right.expr = self._pay(SCAN if _is_constant(left.expr) else READ, right.expr)
                left.expr = self._pay(KEY, left.expr)
            elif not _is_constant(left.expr):
                left.expr, right.expr = self._pay(READ, left.expr), self._pay(READ, right.expr)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """The whole sum pays once, for its result."""
        inner = node
        for _ in range(_MAX_TERMS):
            self._price += _NODE
            inner.right = self.visit(inner.right)
            if not isinstance(inner.left, nodes.Add):
                inner.left = self.visit(inner.left)
                return self._pay(READ, node)
            inner = inner.left
        raise _refuse(node, f"a sum of more than {_MAX_TERMS} terms")

    def _pay_for_result(self, node: nodes.Expr) -> nodes.Node:
        self._rewrite_children(node)
        return node if getattr(node, "ctx", "load") == "store" else self._pay(READ, node)

    visit_Sub = visit_List = visit_Tuple = visit_Dict = _pay_for_result

    def _visit_arithmetic(self, node: nodes.BinExpr) -> nodes.Node:
        """Allows arithmetic on small numbers only: on a string, * repeats and % formats."""
        self._rewrite_children(node)
        for side in (node.left, node.right):
            if _is_constant(side) and not (isinstance(side, nodes.Const) and isinstance(side.value, int | float)):
                raise _refuse(node, f"{node.operator} of something other than a number")
        node.left, node.right = self._pay(NUMBER, node.left), self._pay(NUMBER, node.right)
        return node

    visit_Mul = visit_Div = visit_FloorDiv = visit_Mod = _visit_arithmetic

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self._price += _LOOKUP
        self._rewrite_children(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._pay(SCAN, node.node)
        else:
            node.arg = self._pay(KEY, node.arg)
        return node

    def _rewrite_children(self, node: Any) -> Any:
        self._price += _NODE
        return super().generic_visit(node)

    def _visit_body(self, body: list[Any]) -> int:
        """Rewrites a body that runs many times, in place; returns the units of one run."""
        before, self._price = self._price, _NODE
        body[:] = [self.visit(child) for child in body]
        price, self._price = self._price, before
        return price

    def _visit_filter(self, node: nodes.Filter) -> nodes.Filter:
        name = node.name
        if node.node is None or name not in _READERS | _MAKERS | _LOOKERS | _LAZY:
            raise _refuse(node, f"the filter {name}")
        self._price += _LOOKUP
        self._visit_arguments(node, name)
        operand, is_lazy = self._visit_operand(node.node)
        if is_lazy and (name not in _CONSUMERS | _LAZY or (name == "map" and node.args)):
            raise _refuse(node, f"{name} of the result of {operand.name}")
        if not is_lazy and (name in _READERS or (name == "map" and node.args)):
            operand = self._pay(READ, operand)
        if name in _LAZY or (name in _ITERATORS and not is_lazy):
            operand = self._pay(LOOP, operand, _CALL if name in _LAZY else _LOOKUP)
        node.node = operand
        return self._pay(READ, node) if name in _MAKERS or (is_lazy and name == "join") else node

    def _visit_operand(self, node: Any) -> tuple[Any, bool]:
        """Rewrites an operand that is consumed at once, so that it may be lazy; returns it, and whether it is."""
        is_lazy = isinstance(node, nodes.Filter) and node.name in _LAZY
        return self._visit_filter(node) if is_lazy else self.visit(node), is_lazy

    def _visit_arguments(self, node: Any, name: str) -> None:
        """Requires constant arguments where one can multiply the work or name a filter or test."""
        values = [*node.args, *(keyword.value for keyword in node.kwargs)]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _refuse(node, "a call with *")
        if name in ("d", "default", "get"):
            node.args = [self.visit(value) for value in node.args]
            node.kwargs = [self.visit(keyword) for keyword in node.kwargs]
            if name == "get":
                node.args[:1] = [self._pay(KEY, key) for key in node.args[:1]]
            return
        if not all(_is_small(value, _MAX_TEXT) for value in values):
            raise _refuse(node, f"{name} with an argument that is large, or not constant")
        if name == "replace" and (node.kwargs or not all(_is_small(value, _MAX_NEW) for value in node.args[1:])):
            raise _refuse(node, "replace with a long text")
        named, known = [], _TESTS
        if name == "map":
            named, known = node.args, _READERS - _ITERATORS - {"replace"} | {"length", "tojson"}
        elif name in _LAZY:
            named = node.args[name.endswith("attr") :][:1]
        if any(not isinstance(value, nodes.Const) or value.value not in known for value in named):
            raise _refuse(node, f"{name} with such a filter or test")

    def _pay(self, name: str, node: Any, *args: int) -> Any:
        """Returns the node inside a paying filter; constants are paid for where they stand."""
        is_paid = isinstance(node, nodes.Filter) and node.name == name
        if name not in (LOOP, SPEND) and (is_paid or isinstance(node, nodes.TemplateData) or _is_constant(node)):
            return node
        self._price += 2 * _NODE
        return nodes.Filter(node, name, [nodes.Const(value) for value in args], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    """Whether the node is a literal, whose size is part of the template's."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _is_small(node: nodes.Node, max_text: int) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(_is_small(item, max_text) for item in node.items)
    if not isinstance(node, nodes.Const):
        return False
    value = node.value
    return len(value) <= max_text if isinstance(value, str) else not isinstance(value, int) or abs(value) <= _MAX_NUMBER


def _refuse(node: nodes.Node, what: str) -> CostlyTemplateError:
    return CostlyTemplateError(f"{what} in line {node.lineno}")
