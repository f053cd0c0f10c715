"""JSON Schemas: such as applications use, and a strategy that makes others out of what llguidance supports."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from jaxserve.structured_checks import LARGEST_INTEGER

Schema = dict[str, Any]


def make_object(properties: Schema, *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
LINE = make_object(
    {
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
    }
)
REALISTIC: dict[str, Schema] = {
    "person": make_object(
        {
            "name": STRING,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
        }
    ),
    "sentiment": make_object(
        {
            "label": {"enum": ["positive", "negative", "neutral"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        }
    ),
    "order": make_object(
        {
            "id": {"type": "string", "format": "uuid"},
            "lines": {"type": "array", "items": LINE, "minItems": 1, "maxItems": 4},
            "paid": BOOLEAN,
        }
    ),
    "event": make_object(
        {
            "at": {"type": "string", "format": "date-time"},
            "day": {"type": "string", "format": "date"},
            "kind": {"const": "event"},
        }
    ),
    "optional": make_object({"a": STRING, "b": INTEGER, "c": {"type": ["string", "null"]}}, optional=("a", "c")),
    "tree": {
        "$defs": {
            "node": make_object(
                {"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
                optional=("children",),
            )
        },
        "$ref": "#/$defs/node",
    },
    "union": {
        "anyOf": [
            make_object({"kind": {"const": "cat"}, "lives": INTEGER}),
            make_object({"kind": {"const": "dog"}, "tricks": {"type": "array", "items": STRING}}),
        ]
    },
    "discriminated": {
        "oneOf": [
            make_object({"kind": {"const": "a"}, "x": NUMBER}),
            make_object({"kind": {"const": "b"}, "y": NUMBER}),
        ]
    },
    "map": {"type": "object", "patternProperties": {"^[a-z]{1,6}$": INTEGER}, "additionalProperties": False},
    "free map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER, BOOLEAN], "items": False, "minItems": 3},
    "matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2},
    },
    "network": make_object(
        {"v4": {"type": "string", "format": "ipv4"}, "host": {"type": "string", "format": "hostname"}}
    ),
    "merged": {
        "allOf": [
            {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
            {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]},
        ],
    },
    "ranges": make_object(
        {
            "even": {"type": "integer", "multipleOf": 2, "minimum": 10, "maximum": 50},
            "below": {"type": "number", "exclusiveMaximum": 0, "minimum": -5},
        }
    ),
    "texts": make_object(
        {"short": {"type": "string", "maxLength": 5}, "some": {"type": "string", "minLength": 2, "maxLength": 8}}
    ),
    "call": make_object(
        {"name": {"enum": ["get_weather", "search"]}, "arguments": {"type": "object", "additionalProperties": STRING}}
    ),
    "mixed enum": {"enum": ["a", 1, 2.5, None, True, ["x"], {"y": 0}]},
    "anything": {},
    "unicode": make_object({"größe": {"enum": ["klein", "groß", "日本", '😀 " \\ \n']}, "a/b~c": BOOLEAN}),
    "pydantic": {
        "$defs": {
            "Step": {
                "properties": {
                    "explanation": {"title": "Explanation", "type": "string"},
                    "output": {"default": "", "description": "Result.", "type": "string"},
                },
                "required": ["explanation"],
                "title": "Step",
                "type": "object",
            }
        },
        "properties": {
            "steps": {"items": {"$ref": "#/$defs/Step"}, "title": "Steps", "type": "array"},
            "answer": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["steps"],
        "title": "Reasoning",
        "type": "object",
        "additionalProperties": False,
    },
    "deep": make_object(
        {
            "a": make_object(
                {
                    "b": make_object(
                        {
                            "c": make_object(
                                {"d": {"type": "array", "items": make_object({"e": BOOLEAN}), "maxItems": 2}}
                            )
                        }
                    )
                }
            )
        }
    ),
}

NAMES = st.text("abcxyz_é", min_size=1, max_size=5)
LEAVES = st.one_of(
    st.sampled_from([STRING, INTEGER, NUMBER, BOOLEAN, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 9), st.booleans(), st.none()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.one_of(st.text(max_size=5), st.integers(-LARGEST_INTEGER, LARGEST_INTEGER)).map(lambda value: {"const": value}),
    st.sampled_from(["^[a-c]{2,4}$", "^(x|yy)+z$", "[Z@]", "^é?$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4", "email", "duration"]).map(lambda name: {"type": "string", "format": name}),
)


def make_nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    objects = st.dictionaries(NAMES, inner, max_size=4).flatmap(
        lambda properties: st.sets(st.sampled_from([*properties, ""])).map(
            lambda names: make_object(properties, optional=tuple(names))
        )
    )
    arrays = st.builds(
        lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
    return st.one_of(objects, arrays, tuples, unions)


SCHEMAS = st.recursive(LEAVES, make_nested, max_leaves=6)
