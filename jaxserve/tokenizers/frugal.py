"""Chat templates rendered where they are called, at a price that is paid before the work is done.

A frugal template holds only operations that are linear in their operands, and each of them pays (`metering.py`). So it
cannot do more than `BUDGET` buys, whatever the messages are, and no clock is asked. What is not frugal, costs more or
fails is left to a process that can be killed (`renderer.py`), whose answer counts.

Four messages take 30 to 95 us, 7 to 16 us more than without payment, by templates such as those of Llama, Qwen, Gemma
and Mistral; by way of a process 100 to 210 us. The worst that was found takes 30 ms until it is stopped.
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
MAX_CONVERSATION = 500_000  # units for looking once at its messages, tools and variables
_ELEMENT = 256  # units for looking at one of a list or object
_MAX_SOURCE = 1 << 16  # characters of a template
_MAX_DEPTH = 32  # of lists in lists
_MAX_INT = 1 << 64
_MAX_KEY = 64  # characters
_TEXT = {str, Markup}
_SIZED = {*_TEXT, list, tuple, dict, range, type({}.keys()), type({}.values()), type({}.items())}
_SMALL = {bool, float, type(None), Undefined}


@final
class FrugalTemplate:
    """A frugal template, compiled. Safe to use from several threads."""

    def __init__(self, template: str) -> None:
        """Parses, rewrites and compiles.

        Raises:
            CostlyTemplateError: it is not frugal, or no valid Jinja.
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
        """Returns what `render_template` returns, or None when that must be asked; and the units spent."""
        given = list_variables(messages, variables, tools)
        context: Any = self._compiled.new_context(given)
        try:
            _weigh(given, MAX_CONVERSATION)
            return "".join(self._compiled.root_render_func(context)), BUDGET - context.left
        except Exception:  # a template is foreign code; how it fails is for `render_template` to say
            return None, BUDGET - context.left


class _BudgetError(Exception):
    """It costs too much, or a value is of a kind whose size is not known."""


class _MeteredContext(Context):
    """The variables of one rendering, and what it may still spend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left = BUDGET

    def spend(self, units: int) -> None:
        """Raises _BudgetError when there are not as many left."""
        self.left -= units
        if self.left < 0:
            raise _BudgetError


def _weigh(whole: Any, most: int) -> int:
    """Returns the units for looking at everything inside a value, as often as it is in there.

    Raises:
        _BudgetError: they are more than `most`, it is too deep, or holds what is none of JSON's.
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
    """Paid by what looks at everything inside a value."""
    context.spend(CHAR * len(value) if type(value) is str else _weigh(value, context.left))
    return value


@pass_context
def _scan(context: _MeteredContext, value: Any) -> Any:
    """Paid by what looks at each element of a value; nothing that a template has made callable gets past it."""
    context.spend(_measure(value, CHAR if type(value) in _TEXT else _ELEMENT))
    return value


@pass_context
def _loop(context: _MeteredContext, value: Any, price: int) -> Any:
    """Paid by a loop for all steps at once, each of which costs `price`."""
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
    """Lets pass what is hashed, and compared to many, for nothing."""
    if type(value) in _SMALL or (type(value) is str and len(value) <= _MAX_KEY):
        return value
    return _check_number(value)


def _check_number(value: Any) -> Any:
    """Lets pass what arithmetic can make neither long nor a text."""
    if type(value) in (int, float, bool) and -_MAX_INT < value < _MAX_INT:
        return value
    raise _BudgetError


_FILTERS = {READ: _read, SCAN: _scan, LOOP: _loop, SPEND: _spend, KEY: _check_key, NUMBER: _check_number}
