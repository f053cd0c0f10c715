"""Quantized checkpoints through the engine: the same logits and tokens as the numbers that they stand for."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.core.runtime.compile import watch_compiles
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import load_safetensors
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from tests.e2e.helpers import ROOT, LogitsRecorder, generate_ids, greedy, make_llm, run_on_devices
from tests.golden_cases import load_case
from tests.quantized_files import BOTH_SIDES, METHODS, Method, compressed, fp8, write_quantized

RELATIVE = 1e-4  # of the largest logit
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
QUICK = ("fp8 blocks", "compressed int8 channels", "awq")
CASES = [(name, "llama_gqa") for name in METHODS if name != BOTH_SIDES]
# A fused projection, experts, experts and latents, whose sizes are no multiples of eight.
CASES += [("fp8 blocks", "phi3"), ("compressed words", "phi3"), ("fp8 blocks", "qwen3_moe"), ("awq", "qwen3_moe")]
CASES += [("fp8 blocks", "deepseek_v3"), ("compressed int8 channels", "deepseek_v3"), ("fp8 tensors", "mixtral")]
CASES += [("fp8 blocks", "minimax_m2")]
# Projections of recurrent layers beside parameters that stay whole.
HYBRIDS = ("qwen3_next", "qwen3_5", "lfm2", "granite_hybrid_dense", "nemotron_h", "olmo_hybrid")
CASES += [(method, case) for case in HYBRIDS for method in ("compressed int8 channels", "compressed words")]


def write_pair(folder: Path, method: str, case: str) -> tuple[Path, Path]:
    return write_quantized(load_case(case).path, folder, METHODS[method])


def is_quick(method: str, case: str) -> bool:
    return case == "llama_gqa" and method in QUICK


@pytest.mark.parametrize(
    ("method", "case"),
    [pair if is_quick(*pair) else pytest.param(*pair, marks=THOROUGH) for pair in CASES],
)
def test_equal_to_the_numbers_that_files_stand_for(method: str, case: str, tmp_path: Path) -> None:
    golden = load_case(case)
    found = []
    for folder in write_pair(tmp_path, method, case):
        llm = make_llm(dataclasses.replace(golden, path=folder))
        with LogitsRecorder(llm) as recorder:
            tokens = generate_ids(llm, golden.prompts[:3], greedy(16))
        found.append((tokens, recorder.logits))
    (tokens, logits), (expected_tokens, expected_logits) = found
    assert tokens == expected_tokens
    assert logits.keys() == expected_logits.keys()
    largest = max(np.abs(row).max() for row in expected_logits.values())
    worst = max(np.abs(row - expected_logits[place]).max() for place, row in logits.items())
    assert worst <= RELATIVE * largest * (5 if case == "olmo_hybrid" else 1)  # rounding grows where betas are near 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([("fp8 blocks", "llama_mha")], id="groups that devices would cut", marks=pytest.mark.thorough),
        pytest.param(
            [
                ("gptq in order", "llama_mha"),
                ("compressed words with zeros", "llama_gqa"),
                ("modelopt nvfp4", "llama_gqa"),
                (BOTH_SIDES, "llama_mha"),
                ("compressed int8 channels", "qwen3_moe"),
                ("awq", "qwen3_moe"),
                ("fp8 blocks", "deepseek_v3"),
            ],
            id="others",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_four_devices_give_the_tokens_of_one(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    """Also from an orbax checkpoint, if it has heads for all of them, and with whole experts on each device."""
    arguments = []
    for index, (method, case) in enumerate(pairs):
        folder, _ = write_pair(tmp_path / str(index), method, case)
        converted = tmp_path / str(index) / "orbax"
        script = [sys.executable, "scripts/convert_checkpoint.py", str(folder), str(converted)]
        subprocess.run(script, check=True, cwd=ROOT, capture_output=True)
        has_heads = case in ("llama_mha", "deepseek_v3")
        arguments += [case, str(folder), str(converted) if has_heads else ""]
    assert run_on_devices(4, "from tests.e2e.run_quantized import main; main()", *arguments) == [True] * len(pairs)


def test_dummy_weights_give_finite_logits(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, "gptq in order", "llama_gqa")
    golden = dataclasses.replace(load_case("llama_gqa"), path=folder)
    llm = make_llm(golden, load_format="dummy")
    with LogitsRecorder(llm) as recorder:
        generate_ids(llm, golden.prompts[:1], greedy(4))
    assert all(np.isfinite(row).all() and row.std() > 0 for row in recorder.logits.values())


def test_new_weights_from_files_of_the_same_format(tmp_path: Path) -> None:
    golden = load_case("llama_gqa")
    folder, _ = write_pair(tmp_path / "one", "awq", "llama_gqa")
    llm = make_llm(dataclasses.replace(golden, path=folder), load_format="dummy")
    expected = generate_ids(make_llm(dataclasses.replace(golden, path=folder)), golden.prompts[:2], greedy(8))
    llm.update_weights(folder)
    assert generate_ids(llm, golden.prompts[:2], greedy(8)) == expected
    with pytest.raises(WeightsError, match="lack"):
        llm.update_weights({"layers.0.qkv.weight": np.zeros((32, 128), np.float32)})


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
CHANNELS = Method(compressed("float-quantized", WEIGHTS), fp8(1, None, "weight_scale"))


def test_quantized_while_loading_is_the_file_that_a_tool_would_write(tmp_path: Path) -> None:
    golden = load_case("llama_gqa")
    folder, _ = write_quantized(golden.path, tmp_path, CHANNELS)
    found = []
    for path, options in ((folder, {}), (golden.path, {"quantization": "fp8_per_channel"})):
        llm = make_llm(dataclasses.replace(golden, path=path), **options)
        with LogitsRecorder(llm) as recorder:
            generate_ids(llm, golden.prompts[:2], greedy(8))
        found.append(recorder.logits)
    assert found[0].keys() == found[1].keys()
    for place, row in found[0].items():
        np.testing.assert_allclose(row, found[1][place], rtol=0, atol=RELATIVE * golden.largest_logit)


def test_rows_in_8_bits_are_as_near_as_8_bits_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxserve")
    logits = []
    for activation in (None, "int8_per_token"):
        table = {"linear": {"weight": "int8_per_channel_weight_only", "activation": activation}}
        llm = make_llm("llama_gqa", quantization_config=table)
        with LogitsRecorder(llm) as recorder:
            generate_ids(llm, load_case("llama_gqa").prompts[:1], greedy(2))
        logits.append(recorder.logits)
    place, plain = min(logits[0].items())
    error = np.abs(logits[1][place] - plain).max() / np.abs(plain).max()
    assert 1e-4 < error < 0.05
    assert "bits each, products with activations in int8" in caplog.text


@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_new_weights_are_quantized_likewise_without_a_compilation(stored: bool, tmp_path: Path) -> None:
    golden = load_case("qwen3_moe")
    options = {"quantization": "int4_per_group_weight_only"}
    expected = generate_ids(make_llm(golden, **options), golden.prompts[:2], greedy(8))
    llm = make_llm(golden, load_format="dummy", **options)
    assert generate_ids(llm, golden.prompts[:2], greedy(8)) != expected
    config = parse_config(golden.config)
    tree = load_safetensors(
        golden.path,
        param_specs(config),
        weight_sources(config),
        ignored_weights(config),
        mesh=make_mesh(1),
        rules=DEFAULT_RULES,
    )
    before = watch_compiles()()
    llm.update_weights(golden.path if stored else tree)
    assert watch_compiles()() == before
    assert generate_ids(llm, golden.prompts[:2], greedy(8)) == expected


def test_a_module_that_no_model_has_is_not_left_out() -> None:
    with pytest.raises(ConfigError, match="'q_prj' is no module of the model") as caught:
        make_llm("llama_gqa", quantization="fp8", quantization_config={"ignore": ["q_prj"]})
    assert caught.value.field == "quantization_config.ignore"
