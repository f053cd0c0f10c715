"""What a checkpoint's generation_config.json says is what the engine does."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError
from tests.e2e.helpers import generate_ids, greedy, make_llm
from tests.golden_cases import load_case
from tests.tokenizers import builders

CASE = load_case("llama_gqa")


def make_given(directory: Path, given: dict[str, Any], **options: Any) -> LLM:
    shutil.copytree(CASE.path, directory)
    (directory / "generation_config.json").write_text(json.dumps(given))
    return make_llm(replace(CASE, path=directory), **options)


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_its_end_tokens_end_answers_whichever_tokenizer_is_used(tmp_path: Path, with_tokenizer: bool) -> None:
    tokens = CASE.greedy[0]
    end = next(at for at in range(3, 40) if tokens[at] not in tokens[:at])  # config.json names another
    options: dict[str, Any] = {}
    if with_tokenizer:
        (tmp_path / "words").mkdir()
        builders.make_words(tmp_path / "words", None)
        options = {"tokenizer": str(tmp_path / "words"), "skip_tokenizer_init": False}
    llm = make_given(tmp_path / "model", {"eos_token_id": [2, tokens[end]]}, **options)
    assert generate_ids(llm, CASE.prompts[:1], greedy(64, ignore_eos=False)) == [tokens[: end + 1]]


def test_what_it_forbids_is_never_written_and_its_lengths_hold(tmp_path: Path) -> None:
    first, second = CASE.greedy[:2]
    pairs = list(itertools.pairwise(second))
    at = next(at for at in range(3, 20) if pairs[at] not in pairs[:at])
    suppressed = next(token for token in first if token not in second[: at + 2])
    given = {"suppress_tokens": [suppressed], "bad_words_ids": [list(pairs[at])], "max_new_tokens": 24, "top_k": 1}
    llm = make_given(tmp_path / "model", {**given, "num_beams": 4})
    others, answer = generate_ids(llm, CASE.prompts[:2], None)
    assert suppressed in first[:24] and suppressed not in others and len(others) == len(answer) == 24
    assert answer[: at + 1] == second[: at + 1] and answer[at + 1] != second[at + 1]
    assert generate_ids(llm, CASE.prompts[:2], greedy(24)) == [first[:24], second[:24]], (
        "whoever asks gets what he asks"
    )


def test_without_it_defaults_are_neutral_and_answers_end_where_they_did(tmp_path: Path) -> None:
    tokens = CASE.greedy[0]
    end = next(at for at in range(3, 40) if tokens[at] not in tokens[:at])
    given = {"eos_token_id": tokens[end], "top_k": 7, "max_new_tokens": 3, "suppress_tokens": tokens[:2]}
    llm = make_given(tmp_path / "model", given, generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert generate_ids(llm, CASE.prompts[:1], greedy(64, ignore_eos=False)) == [tokens[: end + 1]]


def test_sampling_defaults_are_its_own_and_null_says_nothing(tmp_path: Path) -> None:
    given = {"do_sample": False, "temperature": None, "top_p": None, "top_k": 7, "repetition_penalty": 1.05}
    llm = make_given(tmp_path / "model", given)
    assert llm.get_default_sampling_params() == SamplingParams(top_k=7, repetition_penalty=1.05)


def test_values_out_of_range_are_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p: must be a finite number"):
        make_given(tmp_path / "model", {"top_p": 3})
