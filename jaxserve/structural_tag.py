"""Reads structural tags: free text in which tags begin, each with content of a given form and an end.

Both published shapes are read: `{"structures": [...], "triggers": [...]}` and `{"format": {...}}`, a tree. Names are
XGrammar's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.structural_parts import (
    AnyText,
    Choice,
    Form,
    PartSequence,
    Repeat,
    Tag,
    Text,
    Token,
    TriggeredTags,
    is_open,
)
from jaxserve.structured_checks import (
    MAX_SCHEMA_BYTES,
    normalise_schema,
    require_grammar,
    require_regex,
    require_text,
)


def read_structural_tag(text: str, field: str) -> Any:
    """Returns the root of a structural tag.

    Args:
        text: a JSON object.
        field: its name in errors.

    Raises:
        InvalidRequestError: names the part that is malformed, or that a grammar here cannot hold.
    """
    given = _Fields(json.loads(text), field)
    given.require_type("structural_tag")
    if "format" in given.values:
        root = _read_part(given.take("format"))
    else:
        tags = tuple(map(_read_structure, given.list_objects("structures")))
        root = _make_triggered(given, given.list_texts("triggers"), tags, "structures")
    given.refuse_others()
    return root


class _Fields:
    """The fields of one JSON object, which are taken by name."""

    def __init__(self, values: Any, field: str) -> None:
        if not isinstance(values, dict):
            raise InvalidRequestError(f"must be an object, got {shorten(values)}", field=field, value=values)
        self.values, self.field = {key: value for key, value in values.items() if value is not None}, field

    def name(self, key: str) -> str:
        return f"{self.field}.{key}"

    def refuse(self, key: str, message: str) -> InvalidRequestError:
        return InvalidRequestError(message, field=self.name(key), value=self.values.get(key))

    def require_type(self, *types: str) -> str:
        found = self.values.pop("type", types[0])
        if found not in types:
            message = f"must be {' or '.join(types)}, got {shorten(found)}"
            raise InvalidRequestError(message, field=self.name("type"), value=found)
        return str(found)

    def take(self, key: str) -> _Fields:
        return _Fields(self.values.pop(key, None), self.name(key))

    def take_value(self, key: str) -> Any:
        return self.values.pop(key, None)

    def take_text(self, key: str) -> str:
        return require_text(self.name(key), self.values.pop(key, None), MAX_SCHEMA_BYTES)

    def take_flag(self, key: str, default: bool = False) -> bool:
        found = self.values.get(key, default)
        if not isinstance(found, bool):
            raise self.refuse(key, f"must be true or false, got {shorten(found)}")
        self.values.pop(key, None)
        return found

    def take_count(self, key: str) -> int:
        found = self.values.get(key)
        if not isinstance(found, int) or isinstance(found, bool) or found < -1:
            raise self.refuse(key, f"must be a whole number, got {shorten(found)}")
        del self.values[key]
        return found

    def list_values(self, key: str, *, may_be_empty: bool = False) -> list[tuple[Any, str]]:
        """Returns the entries of a list with their names."""
        found = self.values.get(key, [] if may_be_empty else None)
        if not isinstance(found, list) or not (found or may_be_empty):
            raise self.refuse(key, f"must be a list that is not empty, got {shorten(found)}")
        self.values.pop(key, None)
        return [(value, f"{self.name(key)}[{at}]") for at, value in enumerate(found)]

    def list_objects(self, key: str) -> list[_Fields]:
        return [_Fields(value, name) for value, name in self.list_values(key)]

    def list_texts(self, key: str, *, may_be_empty: bool = False) -> tuple[str, ...]:
        found = self.list_values(key, may_be_empty=may_be_empty)
        return tuple(require_text(name, value, MAX_SCHEMA_BYTES) for value, name in found)

    def refuse_others(self) -> None:
        for key in self.values:
            raise self.refuse(key, "is not supported here")


def _read_structure(given: _Fields) -> Tag:
    begin, end = given.take_text("begin"), given.take_value("end")
    schema = normalise_schema(given.name("schema"), given.take_value("schema") or {})
    given.refuse_others()
    return Tag(Text(begin), Form("json", schema), _read_ends(end, given.name("end")))


def _read_part(given: _Fields) -> Any:
    kind = given.values.pop("type", None)
    if not isinstance(kind, str) or kind not in _READERS:
        message = f"must be one of {', '.join(_READERS)}, got {shorten(kind)}"
        raise InvalidRequestError(message, field=given.name("type"), value=kind)
    part = _READERS[kind](given)
    given.refuse_others()
    return part


def _read_schema(given: _Fields) -> Form:
    style, schema = given.values.pop("style", "json"), given.take_value("json_schema")
    if style != "json":
        message = f"must be json, got {shorten(style)}; strict tools of such models have their own format"
        raise InvalidRequestError(message, field=given.name("style"), value=style)
    if given.take_flag("any_order"):
        message = "is not supported: keys have the order of the schema"
        raise InvalidRequestError(message, field=given.name("any_order"), value=True)
    return Form("json", normalise_schema(given.name("json_schema"), {} if schema is True else schema))


def _read_sequence(given: _Fields) -> Any:
    parts: list[Any] = []
    for each in given.list_objects("elements"):
        part, last = _read_part(each), parts[-1] if parts else None
        if isinstance(part, Text | Token) and (is_open(last) or (isinstance(last, Form) and last.kind == "regex")):
            part = Tag(Text(""), parts.pop(), (part,))  # the text ends what stands before it
        elif is_open(last):
            message = "follows a part without an end; put that part into a tag, or a const_string behind it"
            raise InvalidRequestError(message, field=each.field, value=None)
        parts.append(part)
    return PartSequence(tuple(parts)) if len(parts) > 1 else parts[0]


def _read_choice(given: _Fields) -> Choice:
    return Choice(tuple(map(_read_part, given.list_objects("elements"))))


def _read_repeat(given: _Fields, least: int | None = None, most: int | None = None) -> Repeat:
    if least is None:
        least, most = given.take_count("min"), given.take_count("max")
        if least < 0 or (most != -1 and (most < least or most == 0)):
            message = f"must be at least min and 1, or -1 for any number, got {most} with min {least}"
            raise InvalidRequestError(message, field=given.name("max"), value=most)
        most = None if most == -1 else most
    inner = given.take("content")
    part = _read_part(inner)
    if is_open(part):
        raise InvalidRequestError("has no end, so it cannot be repeated", field=inner.field, value=None)
    return Repeat(part, least, most)


def _read_tag(given: _Fields) -> Tag:
    given.require_type("tag")
    begin, end, inner = given.take_value("begin"), given.take_value("end"), given.take("content")
    content, ends = _read_part(inner), _read_ends(end, given.name("end"))
    if is_open(content) and not ends:
        raise InvalidRequestError("must not be empty, as the content has no end", field=given.name("end"), value=end)
    given.refuse_others()
    return Tag(Text("") if begin == "" else _read_mark(begin, given.name("begin")), content, ends)


def _read_ends(end: Any, field: str) -> tuple[Text | Token, ...]:
    if end in ("", [""]):
        return ()
    if isinstance(end, list) and end:
        return tuple(_read_mark(each, f"{field}[{at}]") for at, each in enumerate(end))
    return (_read_mark(end, field),)


def _read_mark(given: Any, field: str) -> Text | Token:
    if isinstance(given, Mapping):
        values = _Fields(given, field)
        values.require_type("token")
        token = _read_token(values)
        values.refuse_others()
        return token
    return Text(require_text(field, given, MAX_SCHEMA_BYTES))


def _read_token(given: _Fields) -> Token:
    token = given.values.get("token")
    if not isinstance(token, int | str) or isinstance(token, bool):
        raise given.refuse("token", f"must be the id or the text of a special token, got {shorten(token)}")
    del given.values["token"]
    return Token(token)


def _read_triggered(given: _Fields) -> TriggeredTags:
    triggers = given.list_texts("triggers")
    return _make_triggered(given, triggers, tuple(map(_read_tag, given.list_objects("tags"))), "tags")


def _read_dispatch(given: _Fields) -> TriggeredTags:
    """Reads rules as tags that begin with the whole trigger and have no end."""
    tags = []
    for rule, name in given.list_values("rules"):
        if not isinstance(rule, list) or len(rule) != 2:
            raise InvalidRequestError(f"must be [text, format], got {shorten(rule)}", field=name, value=rule)
        content = _read_part(_Fields(rule[1], f"{name}[1]"))
        if is_open(content):
            raise InvalidRequestError("has no end; put it into a tag", field=f"{name}[1]", value=None)
        tags.append(Tag(Text(require_text(f"{name}[0]", rule[0], MAX_SCHEMA_BYTES)), content))
    triggers = tuple(dict.fromkeys(tag.begin.text for tag in tags if isinstance(tag.begin, Text)))
    stops = not given.take_flag("loop", True)
    return replace(_make_triggered(given, triggers, tuple(tags), "rules"), stop_after_first=stops)


def _make_triggered(given: _Fields, triggers: tuple[str, ...], tags: tuple[Tag, ...], source: str) -> TriggeredTags:
    """Sorts tags by their triggers: each has one, and no trigger hides another."""
    for at, trigger in enumerate(triggers):
        for other in triggers[:at]:
            if trigger in other or other in trigger:
                message = f"{shorten(trigger)} overlaps with {shorten(other)}; one of them would never be reached"
                raise InvalidRequestError(message, field=f"{given.name('triggers')}[{at}]", value=trigger)
    by_trigger: dict[str, list[Tag]] = {trigger: [] for trigger in triggers}
    for at, tag in enumerate(tags):
        begin = tag.begin.text if isinstance(tag.begin, Text) else None
        found = [trigger for trigger in triggers if begin is not None and begin.startswith(trigger)]
        if not found:
            message = f"must be a text that starts with a trigger, got {shorten(begin)}"
            raise InvalidRequestError(message, field=f"{given.name(source)}[{at}].begin", value=begin)
        by_trigger[found[0]].append(tag)
    for at, (trigger, found_tags) in enumerate(by_trigger.items()):
        if not found_tags:
            message = f"no tag begins with {shorten(trigger)}"
            raise InvalidRequestError(message, field=f"{given.name('triggers')}[{at}]", value=trigger)
    return TriggeredTags(
        triggers,
        tuple(map(tuple, by_trigger.values())),
        given.take_flag("at_least_one"),
        given.take_flag("stop_after_first"),
        given.list_texts("excludes", may_be_empty=True),
    )


def _read_separated(given: _Fields) -> Any:
    one = Choice(tuple(map(_read_tag, given.list_objects("tags"))))
    separator, least = given.take_value("separator"), int(given.take_flag("at_least_one"))
    more: Any = one
    if separator != "":
        more = PartSequence((Text(require_text(given.name("separator"), separator, MAX_SCHEMA_BYTES)), one))
    all_of_them = one if given.take_flag("stop_after_first") else PartSequence((one, Repeat(more, 0)))
    return Repeat(all_of_them, least, 1)


_READERS: Mapping[str, Callable[[_Fields], Any]] = {
    "const_string": lambda given: Text(given.take_text("value")),
    "json_schema": _read_schema,
    "regex": lambda given: Form("regex", require_regex(given.name("pattern"), given.take_value("pattern"))),
    "grammar": lambda given: Form("grammar", require_grammar(given.name("grammar"), given.take_value("grammar"))),
    "any_text": lambda given: AnyText(given.list_texts("excludes", may_be_empty=True)),
    "token": _read_token,
    "sequence": _read_sequence,
    "or": _read_choice,
    "optional": lambda given: _read_repeat(given, 0, 1),
    "plus": lambda given: _read_repeat(given, 1),
    "star": lambda given: _read_repeat(given, 0),
    "repeat": _read_repeat,
    "tag": _read_tag,
    "triggered_tags": _read_triggered,
    "tags_with_separator": _read_separated,
    "dispatch": _read_dispatch,
}
