"""Structured output through the whole engine, with the demo model and with overlap."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.errors import InvalidRequestError
from tests.e2e.engines import Engines
from tests.e2e.helpers import make_demo

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def llm(engines: Engines) -> LLM:
    return engines.get(make_demo)


def ask(llm: LLM, params: list[SamplingParams]) -> list[str]:
    outputs = llm.generate(["Describe a person."] * len(params), params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs), outputs
    return [output.outputs[0].text for output in outputs]


def make(seed: int = 0, **constraint: object) -> SamplingParams:
    structured = StructuredOutputsParams(**constraint)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=120, structured_outputs=structured)


def test_forms_hold_beside_rows_without_one(llm: LLM) -> None:
    import jsonschema

    plain = SamplingParams(temperature=0, max_tokens=20)
    params = [
        make(1, json=SCHEMA, disable_any_whitespace=True),
        plain,
        make(2, regex=r"[a-f]{3}-\d{4}"),
        make(3, choice=["yes", "no", "maybe"]),
    ]
    person, free, code, word = ask(llm, params)
    jsonschema.validate(json.loads(person), SCHEMA)
    assert re.fullmatch(r"[a-f]{3}-\d{4}", code) and word in ("yes", "no", "maybe")
    assert free == ask(llm, [plain])[0], "neighbours do not change a row"


def test_a_model_that_writes_blanks_comes_to_an_end(llm: LLM) -> None:
    colours = {"enum": ["red", "green"]}
    form = {"type": "object", "properties": {"first": colours, "second": colours}, "required": ["first", "second"]}
    texts = llm.get_tokenizer().list_token_bytes()
    blanks = [token_id for token_id, text in enumerate(texts) if text.isspace()]
    params = SamplingParams(
        temperature=0,
        max_tokens=280,  # 8 gaps of 33 blanks would take them all
        logit_bias={**dict.fromkeys(blanks, 50.0), texts.index(b"\n"): 90.0},
        structured_outputs=StructuredOutputsParams(json={**form, "additionalProperties": False}),
    )
    (text,) = ask(llm, [params])
    assert re.search(r"\n[ \t]{32}", text) and set(json.loads(text).values()) <= {"red", "green"}


def test_many_seeds_and_more_requests_than_rows(llm: LLM) -> None:
    for text in ask(llm, [make(seed, json=SCHEMA, disable_any_whitespace=True) for seed in range(12)]):
        found = json.loads(text)
        assert set(found) == {"name", "age", "tags"} and 0 <= found["age"] <= 120


def test_batched_equals_alone_and_overlap_changes_nothing(llm: LLM, engines: Engines) -> None:
    params = [make(seed, json=SCHEMA, disable_any_whitespace=True) for seed in (5, 6, 7)]
    together = ask(llm, params)
    assert [ask(llm, [each])[0] for each in params] == together
    plain_loop = engines.get(make_demo, async_scheduling=False)
    assert ask(plain_loop, params) == together


def test_completions_have_matchers_of_their_own(llm: LLM) -> None:
    structured = StructuredOutputsParams(regex=r"\d{6}")
    (output,) = llm.generate(
        ["A number:"],
        SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20, structured_outputs=structured),
        use_tqdm=False,
    )
    assert all(re.fullmatch(r"\d{6}", completion.text) for completion in output.outputs)


def test_forced_text_is_jumped_over(llm: LLM) -> None:
    counts = llm.ready.runner.counts
    before = sum(counts.steps.values())
    forced = "the quick brown fox jumps over the lazy dog and runs away"
    (text,) = ask(llm, [make(0, regex=forced)])
    steps = sum(counts.steps.values()) - before
    assert text == forced
    tokens = len(llm.get_tokenizer().encode(forced, add_special_tokens=False))
    assert steps < tokens / 2, f"{steps} steps for {tokens} tokens that the grammar forces"


def test_a_stop_string_in_forced_text_leaves_no_token_behind_it(llm: LLM) -> None:
    structured = StructuredOutputsParams(regex="the quick brown fox jumps over the lazy dog and runs away")
    options = {"temperature": 1.0, "seed": 0, "max_tokens": 60, "stop": ["x j"], "structured_outputs": structured}
    found = []
    for beside in ({}, {"logprobs": 0}):  # with log-probabilities nothing is jumped over
        (output,) = llm.generate(["Describe a fox."], SamplingParams(**options, **beside), use_tqdm=False)
        (completion,) = output.outputs
        assert completion.text == "the quick brown fo" and completion.stop_reason == "x j"
        found.append(completion.token_ids)
    assert found[0] == found[1]


def test_hostile_grammars_are_refused_and_harm_nobody(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.regex"):
        ask(llm, [make(0, regex="(unclosed")])
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json"):
        ask(llm, [make(0, json={"type": "object", "not": {"required": ["a"]}, "unknownKeyword": 3})])
    assert ask(llm, [make(3, choice=["yes"])]) == ["yes"]


def follow(llm: LLM, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """What small grammars give without automata, and with them; token by token."""
    found = []
    for has_automata in (False, True):
        with monkeypatch.context() as patch:
            if not has_automata:
                patch.setattr("jaxserve.features.grammars.compiler._SMALL_KINDS", ())
            llm.ready.requests._grammars = None  # it keeps compiled ones
            outputs = llm.generate(["Is it so?"] * len(params), params, use_tqdm=False)
        found.append([completion.token_ids for output in outputs for completion in output.outputs])
    return found


SMALL = [
    {"choice": ["yes", "no"]},
    {"choice": ["A", "B", "C", "D"]},
    {"choice": ["a", "ab", "abc", "b"]},
    {"regex": "(ab?c|b)(0|10)?"},
    {"regex": "[1-3][0-2]?[ab]?"},
]


def test_small_grammars_need_no_masks_and_change_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [make(seed, **options) for seed, options in enumerate(SMALL * 3)]
    params += [
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=each.structured_outputs) for each in params
    ]
    params += [SamplingParams(temperature=0, max_tokens=20), make(5, json=SCHEMA, disable_any_whitespace=True)]
    for beside in ({"n": 3}, {"frequency_penalty": 0.5, "min_tokens": 3}, {"logprobs": 2}, {"bad_words": ["yes"]}):
        params.append(
            SamplingParams(seed=8, max_tokens=20, structured_outputs=StructuredOutputsParams(**SMALL[0]), **beside)
        )
    with_masks, with_automata = follow(llm, params, monkeypatch)
    assert with_masks == with_automata and len(with_masks) == len(params) + 2


def test_suppressed_tokens_leave_a_small_grammar_its_other_texts(llm: LLM) -> None:
    free = [make(seed, choice=["yes", "no"]) for seed in range(6)]
    firsts = [token_id for token_id, text in enumerate(llm.get_tokenizer().list_token_bytes()) if text in (b"y", b"ye")]
    suppressed = [*firsts, *llm.get_tokenizer().encode("yes", add_special_tokens=False)]
    assert "yes" in ask(llm, free)
    assert set(ask(llm, [replace(each, suppress_tokens=suppressed) for each in free])) == {"no"}


@pytest.mark.thorough
def test_small_grammars_are_followed_on_the_device(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is made for them, also after a preemption, and a row can follow one after another."""
    tight = make_demo(num_kv_pages_override=8, page_size=8, max_model_len=56)
    monkeypatch.setattr("jaxserve.engine.grammars.GrammarRows.make_masks", None)
    regex = "[a-c][0-2]([a-c][0-2]?)?"
    params = [make(seed, regex=regex) for seed in range(12)]
    outputs = tight.generate(["Describe a person."] * len(params), params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert all(re.fullmatch(regex, text) for text in texts) and len(set(texts)) > 3
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert texts == ask(llm, params)
    assert set(ask(tight, [make(seed, choice=["yes", "no"]) for seed in range(6)])) <= {"yes", "no"}
