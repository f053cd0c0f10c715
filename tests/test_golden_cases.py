"""The golden files themselves: complete, small, and free of near-ties."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open

from tests.golden_cases import CASES, GOLDENS, list_cases_with_legacy_config, load_case, read_manifest

MAX_BYTES = 15_500_000


def test_manifest_lists_exactly_the_folders_on_disk() -> None:
    with_scripts_of_their_own = {"encoders", "classifiers", "gguf", "lora", "towers"}
    folders = {path.name for path in GOLDENS.iterdir() if path.is_dir()} - with_scripts_of_their_own
    assert folders == set(read_manifest()["cases"]) == set(CASES)


def test_all_files_together_stay_small() -> None:
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file()) <= MAX_BYTES


def test_every_family_is_covered() -> None:
    families = {load_case(name).family for name in CASES}
    older = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "phi3"}
    newer = {"olmo", "olmo2", "olmo3", "smollm3", "glm4", "granite", "cohere", "cohere2", "starcoder2", "gpt_neox"}
    experts = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "minimax_m2"}
    latents = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"}
    hybrids = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"}
    hybrids |= {"granitemoehybrid", "nemotron_h", "olmo_hybrid"}
    assert families == older | newer | experts | latents | hybrids


@pytest.mark.parametrize("name", CASES)
def test_answers_are_whole_and_consistent(name: str) -> None:
    case = load_case(name)
    vocab_size = case.config["vocab_size"]
    assert case.min_margin > max(1e-3, 3e-4 * case.largest_logit)
    for prompt, logits, positions, greedy in zip(
        case.prompts, case.logits, case.logit_positions, case.greedy, strict=True
    ):
        assert logits.shape == (len(positions), vocab_size)
        assert logits.dtype == np.float32
        assert max(prompt + greedy) < vocab_size
        assert positions[-1] == len(prompt) + len(greedy) - 2
        assert len(prompt) + len(greedy) <= case.max_model_len
        for position, row in zip(positions, logits, strict=True):
            step = position - len(prompt) + 1
            if step >= 0:
                assert row.argmax() == greedy[step]


@pytest.mark.parametrize("name", CASES)
def test_shards_and_index_agree(name: str) -> None:
    case = load_case(name)
    files = sorted(case.path.glob("*.safetensors"))
    found = {}
    for path in files:
        with safe_open(path, framework="numpy") as shard:
            found.update(dict.fromkeys(shard.keys(), path.name))
    index = case.path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == found


def test_older_configs_use_the_older_keys() -> None:
    names = list_cases_with_legacy_config()
    assert len(names) >= 3
    for name in names:
        old = load_case(name).legacy_config
        assert old is not None
        base = "rotary_emb_base" if old["model_type"] == "gpt_neox" else "rope_theta"
        assert {base, "rope_scaling", "torch_dtype"} <= set(old)
        assert not {"rope_parameters", "dtype"} & set(old)
