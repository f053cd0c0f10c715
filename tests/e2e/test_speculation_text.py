"""Drafts beside grammars, stop strings and recordings, with the demo model."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.engine.grammars import StepMasks
from jaxserve.presets import demo_head_dir
from jaxserve.request import RequestOutput
from jaxserve.tools.cli import main
from tests.e2e.drafters import Mode, Tally, compare, list_texts, make_scripted, run_scripted, teach
from tests.e2e.engines import Engines
from tests.e2e.helpers import PROGRAMS, make_demo
from tests.e2e.test_structured import SCHEMA, SMALL

DEMO_HEAD: dict[str, Any] = {"method": "eagle3", "model": "demo", "num_speculative_tokens": 4}
ALWAYS = {"num_speculative_tokens_per_batch_size": [[1, 64, 4]]}
STORY = "Once upon a time there was a king. "


@pytest.fixture
def plain(engines: Engines) -> LLM:
    return engines.get(make_demo)


@pytest.fixture
def drafting(engines: Engines) -> LLM:
    return engines.get(make_scripted, make_demo, 3)


def ask(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(list_prompts(len(params)), params, use_tqdm=False)


def list_prompts(count: int) -> list[str]:
    return [f"{index}: Describe a person." for index in range(count)]


def check(plain: LLM, drafting: LLM, params: list[SamplingParams]) -> dict[Mode, Tally]:
    expected, prompts = ask(plain, params), list_prompts(len(params))
    return {mode: run_scripted(drafting, prompts, params, expected, mode) for mode in Mode}


def form(seed: int | None = 0, beside: dict[str, Any] | None = None, **constraint: Any) -> SamplingParams:
    """Parameters of a structured answer; no seed: the likeliest one."""
    drawn = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    return SamplingParams(
        max_tokens=70, structured_outputs=StructuredOutputsParams(**constraint), **drawn, **(beside or {})
    )


PERSON = {"json": SCHEMA, "disable_any_whitespace": True}
FORMS = [
    form(1, **PERSON),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    form(2, regex=r"[a-f]{3}-\d{4}( [a-z]+){3}"),
    form(None, **PERSON),
    form(4, {"logprobs": 2}, **PERSON),
    form(5, {"frequency_penalty": 0.6, "min_tokens": 9}, regex=r"(\w+ ){4,9}end"),
    SamplingParams(seed=3, max_tokens=40, ignore_eos=True, top_k=50),
    form(6, {"repetition_penalty": 1.2}, **PERSON),
]


def test_grammars(plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may have a mask late, which loses right drafts.
    monkeypatch.setattr(drafting.ready.engine._grammars, "_mask_timeout", None)
    tallies = check(plain, drafting, FORMS)
    assert tallies[Mode.RIGHT].accepted == tallies[Mode.RIGHT].drafts > 100
    for output, params in zip(ask(drafting, FORMS), FORMS, strict=True):
        (answer,) = output.outputs
        structured = params.structured_outputs
        if structured is not None and structured.json is not None and answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMA)
        elif structured is not None and answer.finish_reason == "stop":
            assert re.fullmatch(str(structured.regex), answer.text)


def test_late_masks(plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, rng = drafting.ready.engine._grammars, random.Random(1)
    make_masks = grammars.make_masks

    def make_late_masks(*arguments: Any) -> StepMasks:
        grammars._mask_timeout = rng.choice((0.0, None))  # some masks are late by chance, but never all of them
        return make_masks(*arguments)

    monkeypatch.setattr(grammars, "_mask_timeout", grammars._mask_timeout)  # which restores it
    monkeypatch.setattr(grammars, "make_masks", make_late_masks)
    tallies = check(plain, drafting, FORMS)
    assert tallies[Mode.RIGHT].accepted > 0  # a right draft is not taken where only the mask behind the first is late


def test_small_grammars_are_followed_along_a_run(plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [form(seed, **SMALL[seed % len(SMALL)]) for seed in range(10)]
    params += [form(7, {"logprobs": 2}, regex="[1-3][0-2]?[ab]?"), form(8, {"n": 3}, choice=["yes", "no"])]
    expected = ask(plain, params)
    monkeypatch.setattr("jaxserve.engine.grammars.GrammarRows.make_masks", None)  # on the device
    for mode in Mode:
        teach(drafting, list_texts(expected), mode)
        compare(ask(drafting, params), expected)


def test_completions_with_forms(plain: LLM, drafting: LLM) -> None:
    check(plain, drafting, [form(3, {"n": 3}, **PERSON), form(4, {"n": 2, "logprobs": 0}, regex=r"[a-z]{5,20}")])


def test_stop_strings_and_bad_words_inside_runs(plain: LLM, drafting: LLM) -> None:
    """The drafter knows what would follow the stop."""
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [STORY, STORY * 2, STORY * 3]
    outputs = plain.generate(prompts, free, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    for place in range(20, 24):  # each place of a run
        ends = [{"stop": [text[place : place + 4], "~~"]} for text in texts]
        ends[1] |= {"include_stop_str_in_output": True}
        ends[2] = {"bad_words": [texts[2][place:].split()[1]]}
        options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 0}
        params = [SamplingParams(**(options | end)) for end in ends]
        expected = plain.generate(prompts, params, use_tqdm=False)
        assert expected[0].outputs[0].finish_reason == "stop"
        for known in (outputs, expected):
            teach(drafting, list_texts(known), Mode.RIGHT)
            compare(drafting.generate(prompts, params, use_tqdm=False), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "suffix", "num_speculative_tokens": 4},
        pytest.param(DEMO_HEAD, marks=pytest.mark.thorough),
    ],
    ids=["suffix", "eagle3"],
)
def test_a_recording_is_replayed_equal(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With late masks and a fault."""
    path = tmp_path / "steps.jsonl"
    llm = make_demo(speculative_config=config | ALWAYS, record_steps=str(path))
    llm.ready.engine._grammars._mask_timeout = 0.0
    # Every other way to sample is in test_replay.py.
    params = [*FORMS[:4] * 2, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)]
    prompts = [STORY * (2 + 2 * (index % 3)) for index in range(len(params))]
    sample, runner, count = llm.ready.runner.sample, llm.ready.runner, 0

    def fail(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 9:
            raise RuntimeError("the device is lost")
        return sample(*arguments)

    runner.sample = fail  # type: ignore[method-assign]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error", "length", "stop"}
    assert llm.ready.engine.scheduler.counts.num_accepted_tokens > 0
    assert sum(count for bucket, count in runner.counts.steps.items() if bucket.width == 5) >= 10
    capsys.readouterr()
    status = main(["replay", str(path), "--compilation-cache-dir", str(PROGRAMS)])
    shown = " ".join(capsys.readouterr().out.split())
    assert status == 0 and "Equal" in shown and "resets │ 1 │" in shown


@pytest.mark.thorough
def test_a_recording_is_refused_with_another_head(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, head = tmp_path / "steps.jsonl", tmp_path / "head"
    shutil.copytree(demo_head_dir(), head)
    llm = make_demo(speculative_config=DEMO_HEAD | ALWAYS | {"model": str(head)}, record_steps=str(path))
    ask(llm, [SamplingParams(max_tokens=3)])
    (weights,) = head.glob("*.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    save_file({**tensors, name: -tensors[name]}, weights)
    assert main(["replay", str(path), "--compilation-cache-dir", str(PROGRAMS)]) == 2
    assert "jaxserve: weights: the recording is of" in " ".join(capsys.readouterr().err.split())
