"""generation_config.json: what of it becomes a default, what is named as left out, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.generation_config import GenerationDefaults, read_end_tokens, read_generation_defaults
from jaxserve.engine.model_files import locate_model
from jaxserve.errors import ConfigError
from jaxserve.presets import demo_model_dir
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.prompts import make_params
from jaxserve.server.protocol.chat import ChatCompletionRequest
from tests.tokenizers.builders import write_json

END = (2, 3)


def read(given: dict[str, Any], **options: Any) -> GenerationDefaults:
    return read_generation_defaults(given, end_tokens=END, **({"has_tokenizer": True} | options))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}, "same"),
        ({"max_new_tokens": 40, "min_new_tokens": 5}, {"max_tokens": 40, "min_tokens": 5}),
        ({"min_new_tokens": 50}, {"max_tokens": 50, "min_tokens": 50}),
        ({"stop_strings": "END"}, {"stop": ["END"]}),
        ({"stop_strings": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"suppress_tokens": [5, 2]}, {"suppress_tokens": [5, 2]}),
        ({"bad_words_ids": [[7], [8, 9], [2]]}, {"suppress_tokens": [7], "bad_words": [[8, 9]]}),  # 2 ends answers
        ({"suppress_tokens": list(range(300)), "bad_words_ids": [[400]]}, {"suppress_tokens": [*range(300), 400]}),
    ],
)
def test_what_becomes_a_default(given: dict[str, Any], expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    defaults = read(given)
    assert defaults.params == SamplingParams(**(given if expected == "same" else expected))
    assert defaults.max_tokens == given.get("max_new_tokens") and not caplog.records


def test_what_is_not_done_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 0.9, "sequence_bias": {"x": 1}, "top_k": 3}
    assert read(given).params == SamplingParams(top_k=3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "top_k" not in record.message
    for named in ("num_beams=4", "no_repeat_ngram_size=3", "typical_p=0.9", "sequence_bias={"):
        assert named in record.message


def test_what_changes_nothing_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    off = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "guidance_scale": None, "sequence_bias": None}
    others = {"do_sample": False, "transformers_version": "5.0", "pad_token_id": 0, "eos_token_id": [1], "use_cache": 1}
    assert read({**off, **others, "penalty_alpha": 0.0, "stop_strings": None}).params == SamplingParams()
    assert not caplog.records


def test_stop_strings_without_a_tokenizer_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert read({"stop_strings": ["END"]}, has_tokenizer=False).params == SamplingParams()
    assert "stop_strings=['END']" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be an integer in"),
        ({"min_new_tokens": "5"}, "min_new_tokens: must be an integer in"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: must be at most max_tokens 8, got 9"),
        ({"stop_strings": ["a"] * 17}, "stop_strings: at most 16 strings, got 17"),
        ({"suppress_tokens": 5}, "suppress_tokens: must be a list of token ids, got 5"),
        ({"suppress_tokens": [-1]}, "suppress_tokens: must be an integer in"),
        ({"bad_words_ids": [5]}, r"bad_words_ids: must be a list of lists of token ids, got \[5\]"),
        ({"bad_words_ids": [[1] * 9]}, "bad_words_ids: at most 8 tokens each, got 9"),
        ({"bad_words_ids": [[1, 2]] * 65}, "bad_words_ids: at most 32 texts, or twice as many lists .* got 65"),
    ],
)
def test_values_that_cannot_work_are_refused_by_the_name_of_the_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^generation_config\.json: {message}"):
        read(given)


def test_a_limit_holds_for_those_who_ask_for_more() -> None:
    default, limit = read({"max_new_tokens": 40}), read({"max_new_tokens": 40}, is_limit=True)
    assert [default.limit_tokens(asked) for asked in (None, 8, 100)] == [40, 8, 100]
    assert [limit.limit_tokens(asked) for asked in (None, 8, 100)] == [40, 8, 40]
    assert [read({}, is_limit=True).limit_tokens(asked) for asked in (None, 100)] == [None, 100]


def test_a_short_answer_is_no_contradiction_to_the_least_length() -> None:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}])
    defaults = GenerationDefaults(SamplingParams(min_tokens=30, max_tokens=60, suppress_tokens=[5]))
    assert make_params(body.list_params(), defaults).min_tokens == 30
    short = make_params(body.list_params(max_tokens=4), defaults)
    assert (short.min_tokens, short.max_tokens, short.suppress_tokens) == (4, 4, (5,))


def locate(**options: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    model = EngineConfig.from_options(**options).model
    files = locate_model(model)
    return files.generation_config, read_end_tokens(model, files.path)


def test_which_file_is_read(tmp_path: Path) -> None:
    own = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}
    assert locate() == (own, (2,))
    assert locate(generation_config="vllm") == ({}, (2,)), "the model's end tokens hold anyway"
    write_json(tmp_path / "generation_config.json", {"top_k": 5, "eos_token_id": [7, 2]})
    assert locate(generation_config=str(tmp_path)) == ({"top_k": 5, "eos_token_id": [7, 2]}, (2, 7))
    preset = {"model": "qwen3-0.6b", "load_format": "dummy"}
    assert locate(**preset) == ({}, ()) and locate(**preset, generation_config=str(tmp_path))[0]["top_k"] == 5


@pytest.mark.parametrize("name", ["none", "", str(demo_model_dir() / "generation_config.json")])
def test_a_directory_without_the_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^generation_config: .*'auto', 'vllm'"):
        locate(generation_config=name)
