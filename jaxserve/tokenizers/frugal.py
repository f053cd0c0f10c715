"""Chat templates rendered in this process, on a budget: every operation is paid for before it runs.

A frugal template holds only operations that are linear in their operands, and each of them pays (`metering.py`). So its
cost is bounded by `BUDGET`, whatever the messages are, without a clock. A template that is not frugal, overspends or
fails is rendered by a process that can be killed (`renderer.py`), and that result is used.

With the templates of Llama, Qwen, Gemma and Mistral, four messages take 30 to 95 us, of which payment is 7 to 16 us; in
a process they take 100 to 210 us. The worst template found ran for 30 ms before it was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any, final

from jinja2 import TemplateError, Undefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from jaxserve.tokenizers.metering import CHAR, KEY, LOOP, NUMBER, READ, SCAN, SPEND, CostlyTemplateError, make_pay
from jaxserve.tokenizers.template import list_variables, make_environment

BUDGET = 4_000_000  # units for one conversation
MAX_CONVERSATION = 500_000  # units to read its messages, tools and variables once
_ELEMENT = 256  # units to read one element of a list or object
_MAX_SOURCE = 1 << 16  # characters of a template
_MAX_DEPTH = 32  # levels of nested lists and objects
_MAX_INT = 1 << 64
_MAX_KEY = 64  # characters
_TEXT = {str, Markup}
_SIZED = {*_TEXT, list, tuple, dict, range, type({}.keys()), type({}.values()), type({}.items())}
_SMALL = {bool, float, type(None), Undefined}


@final
class FrugalTemplate:
    """A frugal template, compiled. Safe to use from several threads."""

    def __init__(self, template: str) -> None:
        """Parses, rewrites and compiles the template.

        Raises:
            CostlyTemplateError: it is not frugal, or not valid Jinja.
        """
        if len(template) > _MAX_SOURCE:
            raise CostlyTemplateError(f"{len(template)} characters")
        environment = make_environment().overlay()
        environment.filters = environment.filters | _FILTERS
        environment.context_class = _MeteredContext
        try:
            tree = environment.parse(template)
            self._compiled = environment.from_string(make_pay(tree, environment))
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise CostlyTemplateError(f"{type(error).__name__}: {error}") from error

    def render(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], *, tools: list[dict[str, Any]] | None = None
    ) -> tuple[str | None, int]:
        """Returns the text of `render_template`, None if it must be rendered elsewhere; and the units spent."""
        given = list_variables(messages, variables, tools)
        context: Any = self._compiled.new_context(given)
        try:
            _weigh(given, MAX_CONVERSATION)
            return "".join(self._compiled.root_render_func(context)), BUDGET - context.left
        except Exception:  # a template is foreign code; `render_template` reports how it fails
            return None, BUDGET - context.left


class _BudgetError(Exception):
    """The budget is spent, or the size of a value is not known."""


class _MeteredContext(Context):
    """The variables of one rendering, and the units it may still spend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left = BUDGET

    def spend(self, units: int) -> None:
        """Takes units from the budget; _BudgetError when too few are left."""
        self.left -= units
        if self.left < 0:
            raise _BudgetError


def _weigh(whole: Any, most: int) -> int:
    """Returns the units to read everything inside a value; what it holds twice counts twice.

    Raises:
        _BudgetError: the units exceed `most`, the value nests too deeply, or it holds something other than JSON.
    """
    weight, level = 0, [whole]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _TEXT:
                weight += CHAR * len(value)
            elif kind is dict or kind is list or kind is tuple:
                weight += _ELEMENT * len(value)
                if weight <= most:
                    below += value
                    if kind is dict:
                        below += value.values()
            elif kind not in _SMALL:
                _check_number(value)
            if weight > most:
                raise _BudgetError
        if not below:
            return weight
        level = below
    raise _BudgetError


@pass_context
def _read(context: _MeteredContext, value: Any) -> Any:
    """Pays for an operation that reads everything inside a value."""
    context.spend(CHAR * len(value) if type(value) is str else _weigh(value, context.left))
    return value


@pass_context
def _scan(context: _MeteredContext, value: Any) -> Any:
    """Pays for an operation that reads each element of a value; refuses callables that a template made."""
    context.spend(_measure(value, CHAR if type(value) in _TEXT else _ELEMENT))
    return value


@pass_context
def _loop(context: _MeteredContext, value: Any, price: int) -> Any:
    """Pays `price` for each step of a loop, all at once where their number is known."""
    if type(value) is GeneratorType:
        return _count(context, value, price)
    context.spend(_measure(value, price))
    return value


def _measure(value: Any, price: int) -> int:
    if value is None or type(value) is Undefined:  # an empty loop, or an error
        return 0
    if type(value) not in _SIZED:
        raise _BudgetError
    return price * len(value)


def _count(context: _MeteredContext, values: Iterator[Any], price: int) -> Iterator[Any]:
    for value in values:
        context.spend(price)
        yield value


@pass_context
def _spend(context: _MeteredContext, value: None, price: int) -> None:
    context.spend(price)


def _check_key(value: Any) -> Any:
    """Returns a value that costs nothing to hash and to compare with many others; refuses all others."""
    if type(value) in _SMALL or (type(value) is str and len(value) <= _MAX_KEY):
        return value
    return _check_number(value)


def _check_number(value: Any) -> Any:
    """Returns a number from which arithmetic makes no long number and no text; refuses all others."""
    if type(value) in (int, float, bool) and -_MAX_INT < value < _MAX_INT:
        return value
    raise _BudgetError


_FILTERS = {READ: _read, SCAN: _scan, LOOP: _loop, SPEND: _spend, KEY: _check_key, NUMBER: _check_number}
