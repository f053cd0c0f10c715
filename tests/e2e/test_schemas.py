"""JSON Schemas by the hundred through the whole engine: whatever the model writes parses and validates."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler
from jaxserve.presets import demo_model_dir
from jaxserve.request import CompletionOutput
from tests.e2e.engines import Engines
from tests.e2e.helpers import make_demo
from tests.examples import scale_examples
from tests.features.grammars.schemas import (
    INTEGER,
    LEAVES,
    REALISTIC,
    SCHEMAS,
    STRING,
    Schema,
    make_nested,
    make_object,
)
from tests.features.grammars.walks import walk

NUM_DRAWN = 230
MAX_TOKENS = 256
# Only the model ends a text, a number, a list or a run of blanks, and these models seldom do: what is added to the
# logits of these tokens. The demo model has a mind of its own, which takes more.
ENDINGS: dict[str, dict[str, float]] = {
    "demo": {'"': 14, "@": 14, "}": 10, "]": 10, ",": 4, "0": -4, " ": -10},
    "random_weights": {'"': 6, "@": 5, "}": 4, "]": 4, ",": 4},
}
SPACING: list[dict[str, Any]] = [{"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}, {}]
FORMAT_NAMES = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
OBJECT, ARRAY, NULL = ({"type": name} for name in ("object", "array", "null"))

# --- schemas

LETTERS = {"^[a-f]{1,3}$": INTEGER}
MORE_LEAVES = st.one_of(
    st.sampled_from(FORMAT_NAMES).map(lambda name: {**STRING, "format": name}),
    st.builds(
        lambda low, size, bound: {"type": "number", "minimum": low, bound: low + size},
        st.integers(-20, 20),
        st.sampled_from([0.5, 1, 2.25]),
        st.sampled_from(["maximum", "exclusiveMaximum"]),
    ),
    st.builds(
        lambda low, step: {**INTEGER, "exclusiveMinimum": low, "maximum": low + 40, "multipleOf": step},
        st.integers(-20, 20),
        st.integers(2, 20),
    ),
    st.builds(  # a name may come twice, so no more than one can be asked for
        lambda low, size: {**OBJECT, "additionalProperties": INTEGER, "minProperties": low, "maxProperties": 1 + size},
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    st.just({**OBJECT, "patternProperties": LETTERS, "additionalProperties": False}),
)
PARTS = st.recursive(LEAVES | MORE_LEAVES, make_nested, max_leaves=6)


def refer(part: Schema, key: str) -> Schema:
    """The same part in three places, one of them a list."""
    place = {"$ref": f"#/{key}/part"}
    places = {"one": place, "other": {"anyOf": [NULL, place]}, "list": {**ARRAY, "items": place, "maxItems": 2}}
    return {key: {"part": part}, **make_object(places, optional=("list",))}


def link(part: Schema) -> Schema:
    """A chain of objects of any length."""
    chain = make_object({"part": part, "next": {"anyOf": [NULL, {"$ref": "#/$defs/chain"}]}})
    return {"$defs": {"chain": chain}, "$ref": "#/$defs/chain"}


def choose(*parts: Schema) -> Schema:
    """One of the parts, and which."""
    return {"oneOf": [make_object({"kind": {"const": f"{n}"}, "part": part}) for n, part in enumerate(parts)]}


def merge(first: Schema, second: Schema) -> Schema:
    """An object that two schemas describe together."""
    return {"allOf": [{**OBJECT, "properties": {"a": first}}, {"required": ["a"], "properties": {"b": second}}]}


def nest(inner: Schema, more: Schema) -> Schema:
    """An object in an object."""
    return make_object({"inner": make_object({"a": inner}), "more": more})


DRAWN = st.one_of(
    SCHEMAS,
    PARTS,
    st.builds(refer, PARTS, st.sampled_from(["$defs", "definitions"])),
    st.builds(link, PARTS),
    *(st.builds(combine, PARTS, PARTS) for combine in (choose, merge, nest)),
)


@cache
def list_schemas() -> list[Schema]:
    """Returns the schemas that all tests share: always the same, all different."""
    found: dict[str, Schema] = {}
    count = scale_examples(NUM_DRAWN)

    @seed(2026)
    @settings(
        max_examples=5 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(DRAWN)
    def draw(schema: Schema) -> None:
        found.setdefault(json.dumps(schema), schema)

    draw()
    formats = [{**STRING, "format": name} for name in FORMAT_NAMES]
    lists = [nest({**ARRAY, "items": each, "maxItems": 2}, each) for each in formats]
    drawn = list(found.values())
    return [*REALISTIC.values(), *lists, *drawn[:: len(drawn) // count][:count]]


def list_keywords(schema: Any) -> Iterator[str]:
    """Yields every keyword of a schema, formats as `format date`, an object in an object as `nested`."""
    if isinstance(schema, list):
        for each in schema:
            yield from list_keywords(each)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            if key == "format":
                yield f"format {value}"
            elif key in ("properties", "patternProperties", "$defs", "definitions"):
                yield from list_keywords([*value.values()])
                if key == "properties" and any("properties" in each for each in value.values()):
                    yield "nested"
            elif key not in ("enum", "const", "required", "default"):
                yield from list_keywords(value)


@pytest.mark.thorough
def test_the_schemas_have_every_keyword() -> None:
    schemas = list_schemas()
    assert len(schemas) == len({json.dumps(schema) for schema in schemas}) > 250
    found = Counter(keyword for schema in schemas for keyword in set(list_keywords(schema)))
    often = "nested required additionalProperties items prefixItems minItems maxItems anyOf oneOf allOf enum const $ref"
    often += " $defs format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern"
    assert min(found[keyword] for keyword in often.split()) >= 10, found
    sometimes = ["definitions", "patternProperties", "minProperties", "maxProperties"]
    assert min(found[keyword] for keyword in [*sometimes, *(f"format {name}" for name in FORMAT_NAMES)]) >= 2, found


# --- formats, as far as grammars assert them: any year may have a February 29, any minute a leap second

FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
DATE = r"\d{4}-\d\d-\d\d"
CLOCK = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
TIMES = r"(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
DAYS = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
PATTERNS = {
    "date": DATE,
    "date-time": rf"{DATE}[Tt]{CLOCK}",
    "time": CLOCK,
    "duration": rf"P(\d+W|{DAYS}(T{TIMES})?|T{TIMES})",
    "hostname": rf"{LABEL}(\.{LABEL})*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=\[\]-]|%[0-9A-Fa-f]{2})*",
}


def has_format(name: str, value: object) -> bool:
    if not isinstance(value, str):
        return True
    if not re.fullmatch(PATTERNS[name], value, re.ASCII):
        return False
    if name.startswith("date"):
        datetime.date.fromisoformat(f"2000{value[4:10]}")
    return True


for _name in PATTERNS:
    FORMATS.checks(_name, raises=ValueError)(lambda value, name=_name: has_format(name, value))


def check_json(text: str, schema: Schema) -> None:
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "0000-02-29", "2026-04-31"),
        ("date-time", "2026-11-21t09:59:60.25+23:59", "2026-11-21 09:59:00Z"),
        ("duration", "P1Y2M3DT4H5M6S", "P1YT"),
        ("email", "a.b@c.d", "a.b"),
        ("hostname", "a-1.example", "a-.example"),
        ("ipv4", "10.0.0.255", "10.0.0.256"),
        ("ipv6", "::ffff:1", "1:2:3"),
        ("time", "23:00:00Z", "24:00:00Z"),
        ("uri", "mailto:a%20b", "mailto:a b"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000"),
    ],
)
def test_formats_are_checked(name: str, good: str, bad: str) -> None:
    check_json(json.dumps(good), {**STRING, "format": name})
    with pytest.raises(jsonschema.ValidationError):
        check_json(json.dumps(bad), {**STRING, "format": name})


# --- models


@pytest.fixture(scope="module")
def demo(engines: Engines) -> LLM:
    return engines.get(make_demo)


@pytest.fixture(scope="module")
def random_weights(engines: Engines) -> LLM:
    """The demo model's vocabulary, and logits that mean nothing."""
    return engines.get(make_demo, str(demo_model_dir()), load_format="dummy")


@pytest.fixture(scope="module")
def compiler(demo: LLM) -> Iterator[GrammarCompiler]:
    """Another one than the engines have."""
    made = GrammarCompiler(demo.get_tokenizer())
    yield made
    made.close()


def list_params(llm: LLM, name: str, schemas: list[Schema], max_tokens: int = MAX_TOKENS) -> list[SamplingParams]:
    """Returns the parameters of a request for each schema, with different seeds and blanks."""
    texts = [data.decode("utf-8", "replace") for data in llm.get_tokenizer().list_token_bytes()]
    bias = {token_id: ENDINGS[name][text] for token_id, text in enumerate(texts) if text in ENDINGS[name]}
    forms = [StructuredOutputsParams(json=each, **SPACING[n % len(SPACING)]) for n, each in enumerate(schemas)]
    return [
        SamplingParams(seed=n, max_tokens=max_tokens, logit_bias=bias, structured_outputs=form)
        for n, form in enumerate(forms)
    ]


def generate(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    outputs = llm.generate(["An example in JSON:"] * len(params), params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(params)
    return [output.outputs[0] for output in outputs]


def check_output(output: CompletionOutput, params: SamplingParams, schema: Schema, compiler: GrammarCompiler) -> None:
    """A text that ended has the form; one that was cut can still get it, which a walk from its end shows."""
    assert params.structured_outputs is not None
    if output.finish_reason == "stop":
        check_json(output.text, schema)
        return
    assert output.finish_reason == "length" and len(output.token_ids) == params.max_tokens
    matcher = compiler.compile(params.structured_outputs).new_matcher()
    for token_id in output.token_ids:
        matcher.accept(token_id)
    tokens = matcher.vocabulary.tokens
    begun = b"".join(tokens[token_id] for token_id in output.token_ids)
    check_json((begun + walk(matcher, np.random.default_rng(0))).decode(), schema)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("demo", marks=pytest.mark.thorough), "random_weights"])
def test_every_output_has_its_form(name: str, compiler: GrammarCompiler, request: pytest.FixtureRequest) -> None:
    llm, schemas = request.getfixturevalue(name), list_schemas()
    params = list_params(llm, name, schemas)
    outputs = generate(llm, params)
    for output, each, schema in zip(outputs, params, schemas, strict=True):
        check_output(output, each, schema, compiler)
    counts = Counter(output.finish_reason for output in outputs)
    print(name, dict(counts), sum(len(output.token_ids) for output in outputs), "tokens")
    assert counts["stop"] >= 0.9 * len(schemas), counts
    assert len({output.text for output in outputs}) > len(schemas) / 2, "not one small text again and again"


@pytest.mark.slow
def test_texts_that_are_cut_are_beginnings(random_weights: LLM, compiler: GrammarCompiler) -> None:
    schemas = list_schemas()[:60]
    for max_tokens in (1, 4, 9):
        params = list_params(random_weights, "random_weights", schemas, max_tokens)
        outputs = generate(random_weights, params)
        assert sum(output.finish_reason == "length" for output in outputs) > len(schemas) / 2
        for output, each, schema in zip(outputs, params, schemas, strict=True):
            check_output(output, each, schema, compiler)


UNSUPPORTED: list[
    tuple[str, Schema]
] = [  # the word of the refusal, and a schema; others are in tests/features/grammars
    *((name, {**ARRAY, name: STRING}) for name in ("contains", "unevaluatedItems")),
    *((name, {**ARRAY, "contains": STRING, name: 1}) for name in ("minContains", "maxContains")),
    *((name, {**OBJECT, name: STRING}) for name in ("propertyNames", "unevaluatedProperties")),
    ("dependentRequired", {**OBJECT, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {**OBJECT, "dependencies": {"a": ["b"]}}),
    ("else", {"if": STRING, "else": INTEGER}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("oneOf", {"oneOf": [{"minimum": 3}, {"maximum": 5}]}),  # not known to exclude each other
    ("minProperties", {**OBJECT, "additionalProperties": INTEGER, "minProperties": 2}),
    ("9007199254740993", {"const": 2**53 + 1}),
    ("-9223372036854775808", {**INTEGER, "minimum": -(2**63)}),
    *((name, {**STRING, "format": name}) for name in ("uri-reference", "idn-email", "json-pointer", "regex")),
]


@pytest.mark.slow
def test_keywords_that_cannot_be_kept_are_named(demo: LLM) -> None:
    for name, schema in UNSUPPORTED:
        for whole in (schema, make_object({"a": {**ARRAY, "items": schema}}), {"anyOf": [schema, STRING]}):
            with pytest.raises(InvalidRequestError, match=rf"^structured_outputs\.json: .*{re.escape(name)}") as caught:
                generate(demo, list_params(demo, "demo", [STRING, whole]))
            assert caught.value.field == "structured_outputs.json", name
    good = [REALISTIC["sentiment"]]
    (output,) = generate(demo, list_params(demo, "demo", good))
    check_json(output.text, good[0])
