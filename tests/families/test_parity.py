"""The model functions against the answers of Hugging Face transformers: whole texts, ragged, in one batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.families.registry import parse_config
from tests.families.naive import NaiveRunner, build_params, read_tensors, unused_tensors
from tests.golden_cases import CASES, list_cases_with_legacy_config, load_case

RELATIVE = 1e-4  # of the case's largest logit

# One per family, and the options that meet in few places; the others rarely fail without one of these.
QUICK = {
    "llama_gqa",
    "llama_head16_kv1",
    "llama_bias",
    "llama_rope_yarn",
    "mistral_window",
    "qwen2_window",
    "qwen3_bias_window",
    "gemma2",
    "gemma3_text",
    "phi3_longrope_long",
}
# Another option, size or type of a family whose other goldens CI has; ropes are in tests/core/layers/test_rope.py, too.
MORE = {
    *(
        "llama_rope_dynamic",
        "llama_rope_linear",
        "llama_rope_llama3",
        "llama_rope_yarn_factor",
        "llama_rope_yarn_mscale",
    ),
    *("llama_head24", "llama_head80", "llama_head96", "llama_mha", "llama_tied", "llama_bf16", "llama_f16"),
    *("gemma2_bf16", "gemma2_f16", "qwen3_moe_bf16", "deepseek_v3_bf16", "deepseek_v2_greedy", "cohere2_bias"),
    *("cohere_qk_norm", "glm4_no_bias", "glm4_moe_qk_norm", "glm4_moe_lite", "gpt_neox_sequential", "granite_bias"),
    *("mistral", "mixtral_packed", "olmo3_bias_ropes", "phi3", "phi3_longrope_short", "qwen2", "qwen3"),
    *("smollm3_window", "starcoder2_window", "gemma4_text_moe", "gpt_oss_mxfp4", "qwen3_5_moe", "lfm2"),
    "granite_hybrid_dense",
}
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
assert {*CASES} >= QUICK | MORE, "a golden was renamed"


def mark(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return THOROUGH if name in MORE else THOROUGH[:1]


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in CASES])
def test_logits_and_greedy_tokens_equal_the_reference(name: str):
    case = load_case(name)
    config = replace(parse_config(case.config), dtype="float32").with_max_model_len(case.max_model_len)
    tensors = read_tensors(case.path)
    assert not unused_tensors(config, tensors)
    runner = NaiveRunner(config, build_params(config, tensors), len(case.prompts))
    texts = [prompt + greedy[:-1] for prompt, greedy in zip(case.prompts, case.greedy, strict=True)]
    for row, logits in enumerate(runner.run(texts)):
        expected = case.logits[row]
        np.testing.assert_allclose(
            logits[case.logit_positions[row]], expected, rtol=0, atol=RELATIVE * case.largest_logit
        )
        assert logits[len(case.prompts[row]) - 1 :].argmax(-1).tolist() == case.greedy[row]


@pytest.mark.parametrize("name", list_cases_with_legacy_config())
def test_old_and_new_spellings_of_a_config_are_one_model(name: str):
    case = load_case(name)
    assert parse_config(case.legacy_config) == parse_config(case.config)


@pytest.mark.parametrize("name", ["gemma2", "phi3_longrope_long"])
def test_chunks_and_padding_change_nothing(name: str):
    case = load_case(name)
    config = replace(parse_config(case.config), dtype="float32").with_max_model_len(case.max_model_len)
    params = build_params(config, read_tensors(case.path))
    texts = [(prompt + greedy)[:24] for prompt, greedy in zip(case.prompts, case.greedy, strict=True)]
    whole = NaiveRunner(config, params, len(texts)).run(texts)
    chunked = NaiveRunner(config, params, len(texts))
    parts = [chunked.run([text[start : start + 8] for text in texts], pad_to=48) for start in (0, 8, 16)]
    for row, expected in enumerate(whole):
        joined = np.concatenate([part[row] for part in parts])
        np.testing.assert_allclose(joined, expected, rtol=0, atol=1e-5 * case.largest_logit)


@pytest.mark.parametrize(("name", "dtype"), [("llama_gqa", "bfloat16"), ("gemma2", "bfloat16"), ("qwen3", "float16")])
def test_sixteen_bit_models_stay_near_float32(name: str, dtype: str):
    case = load_case(name)
    config = replace(parse_config(case.config), dtype=dtype).with_max_model_len(case.max_model_len)
    runner = NaiveRunner(config, build_params(config, read_tensors(case.path)), len(case.prompts))
    texts = [prompt + greedy[:-1] for prompt, greedy in zip(case.prompts, case.greedy, strict=True)]
    outputs = runner.run(texts)
    assert runner.cache[0].dtype == dtype and outputs[0].dtype == np.float32
    errors = [
        np.abs(logits[positions] - expected).mean()
        for logits, positions, expected in zip(outputs, case.logit_positions, case.logits, strict=True)
    ]
    assert np.mean(errors) < {"bfloat16": 0.006, "float16": 0.0008}[dtype] * case.largest_logit
