"""Adapters against checkpoints into which numpy has merged them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LoRARequest
from tests.e2e.helpers import LogitsRecorder, greedy, make_llm
from tests.features.lora.adapter_files import AdapterSpec, write_adapter, write_merged
from tests.golden_cases import CASES, load_case

# Fused q, k and v in each form, latents, a delta rule, shared experts, no gate, interleaved rotation, inputs of layers.
QUICK = ("llama_gqa", "gpt_neox", "deepseek_v2", "qwen3_5", "gemma4_text")
PATTERNS = {
    "use_rslora": True,
    "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 3, "down_proj": 8},
    "alpha_pattern": {r".*\.1\..*": 24.0},
}


def mark(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.slow, pytest.mark.thorough]


def run(llm: Any, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], dict[Any, np.ndarray]]:
    with LogitsRecorder(llm) as recorder:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], greedy(64), use_tqdm=False, **options
        )
    return [output.outputs[0].token_ids for output in outputs], recorder.logits


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in CASES])
def test_rows_with_an_adapter_are_those_of_the_merged_model_and_others_those_of_the_base(name: str, tmp_path: Path):
    case = load_case(name)
    if case.family in ("gpt_oss",) and "mxfp4" in name:
        pytest.skip("its files have no matrices to merge into; see test_quantized_bases")
    spec = AdapterSpec(4, seed=3, config=PATTERNS)
    adapter = LoRARequest("own", 1, str(write_adapter(case.path, tmp_path / "adapter", spec)))
    prompts = case.prompts[:2]
    llm = make_llm(case, enable_lora=True, max_loras=2, max_lora_rank=8)
    tokens, logits = run(llm, prompts, lora_request=[adapter, None])
    assert tokens[1] == case.greedy[1]
    merged = make_llm(replace(case, path=write_merged(case.path, tmp_path / "merged", spec)))
    expected, reference = run(merged, prompts[:1])
    assert tokens[0] == expected[0]
    last = len(prompts[0]) - 1
    base = case.logits[0][list(case.logit_positions[0]).index(last)]
    change = abs(reference[tuple(prompts[0]), last] - base).max()
    assert change > 1e-2 * case.largest_logit, "the adapter changes nothing"
    for key, line in reference.items():
        np.testing.assert_allclose(logits[key], line, rtol=0, atol=1e-4 * max(case.largest_logit, abs(line).max()))
