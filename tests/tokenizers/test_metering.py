"""What a template may cost is refused, or stopped before it is done: counted in lines, bytes and units, not in time."""

from __future__ import annotations

import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest

from jaxserve.tokenizers.frugal import CostlyTemplateError, FrugalTemplate

MAX_LINES = 20_000  # of a template, run by one conversation
MAX_BYTES = 16 << 20  # held at once by one conversation
REFUSED = {  # templates by what cannot be paid for beforehand
    "a wide format": "{{ '%2000000000d' % 1 }}",
    "a wide format of a constant": "{% set f = '%2000000000d' %}{{ [1] }}{{ 'x' % f }}",
    "a wide format by a test": "{{ '%2000000000d' is odd }}{{ '%2000000000d' is divisibleby 3 }}",
    "format": "{{ '{:2000000000d}'.format(1) }}",
    "the filter format": "{{ '%2000000000d' | format(1) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "indent": "{{ messages[0].content | indent(1000000000) }}",
    "a wide tojson": "{{ messages | tojson(indent=1000000000) }}",
    "a wide tojson by a variable": "{{ messages | tojson(indent=n) }}",
    "wordwrap": "{{ messages[0].content | wordwrap(1) }}",
    "a long text times": "{{ 'a' * 1000000000 }}",
    "a list times": "{{ [1, 2] * n }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "replace by a variable": "{{ messages[0].content.replace('a', messages[0].content) }}",
    "replace by a variable of nothing": "{{ messages[0].content | replace('', messages[0].content) }}",
    "replace by much": "{{ messages[0].content | replace('a', '" + "b" * 65 + "') }}",
    "join by a variable": "{{ messages | join(messages[0].content) }}",
    "join of a text": "{{ messages[0].content.join(messages[0].content) }}",
    "translate": "{{ messages[0].content.translate(messages[0]) }}",
    "batch": "{{ messages | batch(1000000000, 'x') | list }}",
    "slice": "{{ messages | slice(1000000000) | list }}",
    "sum": "{{ messages | sum(start=[]) }}",
    "unique": "{{ messages | unique | list }}",
    "groupby": "{{ messages | groupby('role') }}",
    "cycle": "{% for m in messages %}{{ loop.cycle(messages, messages) }}{% endfor %}",
    "changed": "{% for m in messages %}{{ loop.changed(messages) }}{% endfor %}",
    "pprint": "{{ messages | pprint }}",
    "urlize": "{{ messages[0].content | urlize }}",
    "striptags": "{{ messages[0].content | striptags }}",
    "xmlattr": "{{ messages[0] | xmlattr }}",
    "escape": "{{ messages[0].content | escape }}",
    "attr": "{{ ('a' | attr('ljust'))(1000000000) }}",
    "map with a wide filter": "{{ ['a'] | map('center', 1000000000) | list }}",
    "map with a filter by a variable": "{{ ['a'] | map(f, 1000000000) | list }}",
    "map with a method": "{{ ['a'] | map('attr', 'ljust') | list }}",
    "map with sort": "{{ [messages[0].content] | map('sort') | list }}",
    "select with a wide test": "{{ ['%2000000000d'] | select('odd') | list }}",
    "select with a test by a variable": "{{ ['%2000000000d'] | select(t) | list }}",
    "selectattr with a wide test": "{{ messages | selectattr('content', 'even') | list }}",
    "a lazy filter that is kept": "{% set x = messages | map(attribute='role') %}{{ x | list }}",
    "lazy filters that pile up": "{% set ns = namespace(x=messages) %}{% for c in messages[0].content %}"
    "{% set ns.x = ns.x | selectattr('role') %}{% endfor %}",
    "a wide date": "{{ strftime_now('%1000000000d') }}",
    "a wide date by its name": "{{ strftime_now(form='%1000000000d') }}",
    "a date by a variable": "{{ strftime_now(messages[0].content) }}",
    "a method by another name": "{% set f = 'a'.ljust %}{{ f(1000000000) }}",
    "a method as an element": "{{ ['a'.ljust][0](1000000000) }}",
    "a method that was looked up": "{{ 'a'['ljust'](1000000000) }}",
    "a method by the name of a function": "{% set range = 'a'.ljust %}{{ range(1000000000) }}",
    "a method by the name of a macro": "{% macro f(x) %}{% endmacro %}{% set f = 'a'.ljust %}{{ f(1000000000) }}",
    "a method by the name of a loop's variable": "{% for range in ['a'.ljust] %}{{ range(1000000000) }}{% endfor %}",
    "a method by the name of an argument": "{% macro f(range) %}"
    "{{ range(1000000000) }}{% endmacro %}{{ f('a'.ljust) }}",
    "a function before a macro of its name": "{{ strftime_now('%1000000000d') }}"
    "{% macro strftime_now(x) %}{% endmacro %}",
    "a call with a list": "{{ raise_exception(*messages) }}",
    "a filter with a list": "{{ messages | join(*messages) }}",
    "an object of an object": "{{ dict(messages[0]) }}{{ dict(a=messages, b=messages) }}",
    "arguments that nobody named": "{% macro f() %}{{ varargs }}{% endmacro %}{{ f(1) }}",
    "a caller": "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{% endcall %}",
    "a loop that calls itself": "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "a block": "{% block a %}{{ self.a() }}{% endblock %}",
    "an include": "{% include 'x' %}",
    "an import": "{% import 'x' as x %}",
    "an extends": "{% extends 'x' %}",
    "escaping": "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
    "a filtered block": "{% filter center(1000000000) %}a{% endfilter %}",
    "a filtered variable": "{% set x | center(1000000000) %}a{% endset %}",
    "a filtered variable of many": "{% set x | upper | center(1000000000) %}a{% endset %}",
    "with": "{% with x = 'a'.ljust %}{{ x(1000000000) }}{% endwith %}",
    "a joiner": "{% set x = joiner(messages) %}{{ x() }}",
    "a cycler": "{% set x = cycler(messages) %}{{ x.next() }}",
    "a long sum": "{{ " + " + ".join(["messages"] * 40) + " }}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long chain": "{{ " + " * ".join(["n"] * 5000) + " }}",
    "nested loops": "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "no filter": "{{ messages | nonsense }}",
    "a filter of ours": "{{ messages | <read> }}",
    "no Jinja": "{% if %}",
    "a long template": "x" * (1 << 17),
}


@pytest.mark.parametrize("name", REFUSED)
def test_costly_templates_are_refused(name: str) -> None:
    with pytest.raises(CostlyTemplateError):
        FrugalTemplate(REFUSED[name])


LOOP, END = "{% for i in range(200) %}", "{% endfor %}"
DOUBLE = "{% macro double(x) %}{{ x }}{{ x }}{% endmacro %}"
GROW = "{% set ns = namespace(x=messages[0].content, y=[1], n=3) %}" + LOOP
DAG = "{% set top = namespace(x=1) %}{% set a = namespace(x=1, y=1) %}{% set ns = namespace(x=a, y=a) %}"
DAG += "{% for i in range(60) %}"
DAG += "{% set ns = namespace(x=ns, y=ns) %}{% set top.x = namespace(x=top.x, y=top.x) %}{% endfor %}"
STOPPED = {  # templates that are frugal by the letter, and stopped
    "loops in loops": "{% for a in messages %}" * 4 + "{{ a }}" + "{% endfor %}" * 4,
    "ranges in ranges": "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "empty loops": "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "characters in characters": "{% for a in messages[0].content %}"
    "{% for b in messages[0].content %}{% endfor %}" + END,
    "characters one by one": "{% for a in messages[0].content %}{{ messages[0].content }}" + END,
    "a filtered loop": "{% for a in range(200) if 'b' not in messages[0].content %}{{ messages }}" + END,
    "a loop whose test does all": "{% for a in range(200) if messages | tojson == messages | string %}" + END,
    "loops over what filters bring": "{% for a in messages | select %}{% for b in messages | map('string') %}"
    "{% for c in messages | selectattr('role') %}{{ messages | tojson }}{% endfor %}{% endfor %}" + END,
    "what filters let pass none of": "{% for a in range(200) %}{{ messages | select('none') | list }}" + END,
    "loops in branches never taken": "{% for a in range(99999) %}{% if a < 0 %}{{ 'x' }}{% endif %}" + END,
    "a text that doubles by ~": GROW + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "a text that doubles by +": GROW + "{% set ns.x = ns.x + ns.x %}" + END,
    "a text that doubles in a block": GROW + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}" + END,
    "a text that doubles in a macro": DOUBLE + GROW + "{% set ns.x = double(ns.x) %}" + END,
    "a text that grows by tojson": GROW + "{% set ns.x = ns.x | tojson %}" + END,
    "a text that grows by string": GROW + "{% set ns.x = [ns.x] | string %}" + END,
    "a text that grows by trim": GROW + "{% set ns.x = [ns.x, ns.x] | trim %}" + END,
    "a text that grows by replace": GROW + "{% set ns.x = ns.x.replace('', 'aaaaaaaaaaaaaaaa') %}" + END,
    "a text that grows by join": GROW + "{% set ns.x = ns.x | join('" + "-" * 64 + "') %}" + END,
    "a text that grows by safe": GROW + "{% set ns.x = ('<' | safe + ns.x) | string %}" + END,
    "a text written over and over": LOOP + "x" * 10_000 + "{% endfor %}",
    "a constant over and over": "{% set x %}{% for i in range(200) %}"
    "{{ '" + "x" * 10_000 + "' }}{% endfor %}{% endset %}",
    "a list that doubles": GROW + "{% set ns.y = ns.y + ns.y %}" + END,
    "a list of itself twice": GROW + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
    "a tuple of itself twice": GROW + "{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ ns.y }}",
    "an object of itself twice": GROW + "{% set ns.y = {'a': ns.y, 'b': ns.y} %}{% endfor %}{{ ns.y }}",
    "a list in lists": GROW + "{% set ns.y = [ns.y] %}{% endfor %}{{ ns.y | tojson }}",
    "lists of characters": GROW + "{% set ns.y = ns.x | list %}" + END,
    "lists of pieces": GROW + "{% set ns.y = ns.x.split('a') %}" + END,
    "a list from a range": "{{ range(99999) | list }}",
    "a joined range": LOOP + "{{ range(200) | join }}" + END,
    "a number that doubles": GROW + "{% set ns.n = ns.n + ns.n %}" + END,
    "a number that is squared": GROW + "{% set ns.n = ns.n * ns.n %}" + END,
    "a negative number that doubles": GROW + "{% set ns.n = ns.n - (0 - ns.n) %}" + END,
    "digits": "{{ (messages[0].digits | int) * 3 }}",
    "namespaces in namespaces": DAG + "{{ top }}",
    "namespaces in namespaces by ~": DAG + "{{ top ~ '' }}",
    "namespaces in namespaces as a text": DAG + "{{ top | string }}",
    "namespaces in namespaces in an error": DAG + "{{ raise_exception(top) }}",
    "namespaces in namespaces in a list": DAG + "{{ [top] | trim }}",
    "namespaces in namespaces as a key": DAG + "{{ {}[top] }}{{ top in [1] }}",
    "a method in a namespace": "{% set ns = namespace() %}{% set ns.strip = 'a'.ljust %}{{ ns.strip(8) }}",
    "a method in an object": "{% set x = {'strip': 'a'.ljust} %}{{ x.strip(8) }}",
    "a method in a loop": "{% for x in ['a'] %}{{ loop.get(1) }}" + END,
    "a text of digits as a format": "{% set x = messages[0].format %}{{ x % 1 }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "macros that call each other": "{% macro f() %}{{ g() }}{% endmacro %}"
    "{% macro g() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "a tower of macros": "".join(
        f"{{% macro f{n}() %}}{f'{{{{ f{n - 1}() }}}}' * 10 if n else 'x'}{{% endmacro %}}" for n in range(9)
    ) + "{{ f8() }}",
    "a macro's default": "{% macro f(x=messages | tojson) %}{{ x }}{% endmacro %}"
    "{% for i in range(200) %}{{ f() }}" + END,
    "comparisons of all with all": LOOP + "{% if messages == messages[:] %}{% endif %}" + END,
    "orders of all": LOOP + "{{ messages[0].content | sort }}" + END,
    "searches in a text": LOOP + "{{ 'aaaaaaaab' in messages[0].content }}" + END,
    "searches of keys": LOOP + "{{ messages[0].role in messages }}" + END,
    "searches of a text": LOOP + "{{ messages[0].content in messages[0].content }}" + END,
    "slices": LOOP + "{{ messages[0].content[1:] == 'a' }}" + END,
    "slices of a list": LOOP + "{% set x = messages[::-1] %}{% set x = messages[0].content.split('a')[1:] %}" + END,
    "methods of a text": LOOP + "{{ messages[0].content.strip('b') == messages[0].content.upper() }}" + END,
    "tuples as keys": "{% set t = (messages[0].content, 1) %}{% for i in range(200) %}{{ {'a': 1}[t] }}" + END,
    "long keys": LOOP + "{{ messages[0].get(messages[0].content) }}" + END,
    "dates": "{% for i in range(9999) %}{{ strftime_now('%c') }}" + END,
    "namespaces": "{% for i in range(9999) %}{% set ns = namespace(x=1) %}" + END,
}  # fmt: skip
MANY = [
    {"role": "user", "content": "a" * 20_000, "digits": "9" * 4000, "format": "%2000000000d"},
    *({"role": "assistant", "content": str(n)} for n in range(200)),
]


@pytest.mark.parametrize("name", STOPPED)
def test_costly_conversations_are_stopped(name: str) -> None:
    """By lines of the template that are run and by bytes that are held, which other tools than ours count."""
    made, lines = FrugalTemplate(STOPPED[name]), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename == "<template>" else None

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        text, _ = made.render(MANY, {})
    finally:
        sys.settrace(tracer)
    assert text is None
    assert lines < MAX_LINES
    tracemalloc.start()
    try:
        made.render(MANY, {})
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
