"""Tools to offer: ones that add, ones that look terms up, and others, under many names, descriptions and arguments.

Each has two sides by a fixed hash of its names: the exam's are never offered in training.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any, Literal

from demo_lm.tasks import draw_invented_word

Kind = Literal["add", "lookup", "other"]

_HELD_OUT = 0.12
# fmt: off
_ADD_NAMES = (("add", "sum", "plus", "addition", "total"), ("", "numbers", "two", "integers", "values", "up", "both"))
_LOOKUP_NAMES = (
    ("lookup", "look_up", "define", "explain", "glossary", "dictionary", "search", "find"),
    ("", "term", "word", "definition", "glossary", "meaning", "entry"),
)
_PREFIXES = ("", "", "", "do_", "get_", "my_", "tool_", "run_", "math_", "fast_", "demo_")
_ADD_TEXTS = (
    ("Adds", "Add", "Sums", "Sum", "Returns the sum of", "Computes the sum of", "Calculates the sum of", "Adds up",
     "Gives the total of", "Finds the sum of", "Use this to add"),
    ("two numbers", "two integers", "numbers", "both numbers", "a pair of numbers", "two whole numbers", "two values"),
    ("", "", "", " and returns the result", " exactly", " for you", " together", " of any size"),
)
_LOOKUP_TEXTS = (
    ("Looks up", "Look up", "Finds", "Searches for", "Explains", "Defines", "Returns the meaning of",
     "Returns the definition of", "Gives the definition of", "Use this to look up", "Finds the meaning of"),
    ("a term", "a word", "one term", "any term", "the term", "an entry", "a technical term"),
    ("", "", " in the glossary", " in a dictionary", " in the manual", " for you", " in the database"),
)
_OTHERS = (
    (("weather", "get_weather", "forecast"), ("Tells the weather", "Gets the weather of a city"), ("city", "day")),
    (("send_mail", "email", "write_mail"), ("Sends an email", "Writes a mail to somebody"), ("to", "subject")),
    (("play_music", "play_song"), ("Plays a song", "Starts some music"), ("song", "volume")),
    (("set_alarm", "alarm"), ("Sets an alarm", "Wakes you at a time"), ("time", "label")),
    (("translate", "translate_text"), ("Translates a text", "Turns a text into another language"),
     ("text", "language")),
    (("open_door", "unlock"), ("Opens a door", "Unlocks the door of a room"), ("room", "code")),
    (("subtract", "minus", "difference"), ("Subtracts two numbers", "Returns the difference of two numbers"),
     ("a", "b")),
    (("multiply", "times", "product"), ("Multiplies two numbers", "Returns the product of two numbers"), ("x", "y")),
    (("get_time", "clock"), ("Tells the time", "Returns the time of a zone"), ("zone", "format")),
    (("buy", "order_item"), ("Buys an item", "Orders items from the shop"), ("item", "count")),
    (("read_file", "open_file"), ("Reads a file", "Returns the text of a file"), ("path", "lines")),
    (("run_shell", "bash"), ("Runs a command", "Runs a shell command and returns its output"), ("command", "timeout")),
)
_ADD_ARGUMENTS = (
    ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2"), ("m", "n"), ("one", "other"),
    ("a", "c"), ("p", "q"), ("first_number", "second_number"), ("augend", "addend"), ("i", "j"), ("lhs", "rhs"),
)
_LOOKUP_ARGUMENTS = ("term", "word", "query", "name", "key", "q", "text", "topic", "entry", "phrase", "subject")
_ARGUMENT_TEXTS = ("The {}.", "A {} to use.", "Value of {}.", "{}")
# fmt: on


@dataclass(frozen=True)
class ToolChoice:
    """A tool, and what training knows of it."""

    kind: Kind
    name: str
    arguments: tuple[tuple[str, str], ...]  # name and JSON type of each, in the schema's order
    function: dict[str, Any]  # as `tools[].function` of a request has it

    def describe(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {"type": "function", "function": self.function}


def draw_tools(rng: random.Random, kinds: list[Kind], *, held_out: bool = False) -> list[ToolChoice]:
    """One tool of each kind, in this order, all with different names."""
    tools: list[ToolChoice] = []
    while len(tools) < len(kinds):
        tool = draw_tool(rng, kinds[len(tools)], held_out=held_out)
        if tool.name not in {each.name for each in tools}:
            tools.append(tool)
    return tools


def draw_tool(rng: random.Random, kind: Kind, *, held_out: bool = False) -> ToolChoice:
    """A tool whose name or description says what it does."""
    plain = rng.random() < 0.15 and kind != "other" and not held_out
    name = {"add": "add", "lookup": "lookup"}[kind] if plain else ""
    other = rng.choice(_OTHERS)
    tells = rng.random() < 0.75 or plain
    while not name or (not plain and is_held_out(f"{kind} {name}") != held_out):
        name = _draw_name(rng, kind, other) if tells else draw_identifier(rng)
    text = _draw_text(rng, kind, other, held_out=held_out) if not tells or rng.random() < 0.8 else None
    arguments = _draw_arguments(rng, kind, other, plain=plain and rng.random() < 0.8)
    return ToolChoice(kind, name, arguments, _write_function(rng, name, text, arguments))


def draw_identifier(rng: random.Random) -> str:
    """A name of a function or an argument that says nothing."""
    words = [draw_invented_word(rng) for _ in range(rng.choice((1, 1, 2)))]
    name = "_".join(words) if rng.random() < 0.7 else words[0] + "".join(word.capitalize() for word in words[1:])
    return name + (str(rng.randint(1, 9)) if rng.random() < 0.1 else "")


def is_held_out(text: str) -> bool:
    """Whether a name or a text is kept for the exam, by a fixed hash."""
    return zlib.crc32(f"tool {text}".encode()) / 2**32 < _HELD_OUT


def _draw_name(rng: random.Random, kind: Kind, other: Any) -> str:
    if kind == "other":
        return rng.choice(_PREFIXES) + rng.choice(other[0]) + rng.choice(("", "", "_tool", "2", "_now"))
    first, second = (rng.choice(part) for part in (_ADD_NAMES if kind == "add" else _LOOKUP_NAMES))
    if second and rng.random() < 0.3:
        return first.replace("_", "") + second.capitalize()
    return rng.choice(_PREFIXES) + "_".join(filter(None, (first, second)))


def _draw_text(rng: random.Random, kind: Kind, other: Any, *, held_out: bool) -> str:
    while True:
        if kind == "other":
            return rng.choice(other[1]) + rng.choice(("", ".", "."))
        parts = _ADD_TEXTS if kind == "add" else _LOOKUP_TEXTS
        text = "".join((rng.choice(parts[0]), " ", rng.choice(parts[1]), rng.choice(parts[2])))
        if is_held_out(text) == held_out:
            return text + rng.choice(("", ".", "."))


def _draw_arguments(rng: random.Random, kind: Kind, other: Any, *, plain: bool) -> tuple[tuple[str, str], ...]:
    number = "integer" if rng.random() < 0.7 else "number"
    if kind == "add":
        names: tuple[str, ...] = ("a", "b") if plain else rng.choice(_ADD_ARGUMENTS)
        if not plain and rng.random() < 0.4:
            names = (draw_identifier(rng), draw_identifier(rng) + "_2")
        return tuple((name, number) for name in names)
    if kind == "lookup":
        name = "term" if plain else rng.choice(_LOOKUP_ARGUMENTS) if rng.random() < 0.6 else draw_identifier(rng)
        return ((name, "string"),)
    names = other[2] if rng.random() < 0.5 else tuple({draw_identifier(rng) for _ in range(rng.randint(1, 3))})
    return tuple((name, rng.choice(("string", "string", "integer"))) for name in sorted(names)[: rng.randint(1, 3)])


def _write_function(
    rng: random.Random, name: str, text: str | None, arguments: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """The function with its schema, as loosely or as fully as clients send it."""
    describes, titles = rng.random() < 0.15, rng.random() < 0.15
    properties = {}
    for argument, kind in arguments:
        schema: dict[str, Any] = {"title": argument.replace("_", " ").title()} if titles else {}
        schema["type"] = kind
        if describes:
            schema["description"] = rng.choice(_ARGUMENT_TEXTS).format(argument)
        properties[argument] = schema
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.75:
        parameters["required"] = [argument for argument, _ in arguments]
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    if rng.random() < 0.15:
        parameters = dict(rng.sample(sorted(parameters.items()), len(parameters)))
    return {"name": name, **({"description": text} if text is not None else {}), "parameters": parameters}
