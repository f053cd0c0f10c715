"""8-bit KV pages: what they cost in accuracy, and that a checkpoint's scales are used."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.errors import WeightsError
from tests.e2e.engines import Engines
from tests.e2e.helpers import LogitsRecorder, greedy, make_llm
from tests.golden_cases import load_case

CASE, LATENT_CASE = "llama_gqa", "deepseek_v3"
SCALES = {"k": 0.02, "v": 0.01}  # keys and values of the case are of order one: unscaled they use few of e4m3's steps


def first_logits(llm: LLM, case: str = CASE) -> np.ndarray:
    """[prompts, V], of the first new token."""
    prompts = load_case(case).prompts
    with LogitsRecorder(llm) as recorder:
        llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], greedy(2), use_tqdm=False)
    return np.stack([recorder.logits[tuple(prompt), len(prompt) - 1] for prompt in prompts])


def add_scales(folder: Path, name: str, shape: tuple[int, ...], *, missing: str = "", case: str = CASE) -> Path:
    """A copy of the case's checkpoint with scales of every layer under `name`, but for the `missing` one."""
    source = load_case(case).path
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {key: tensor for file in source.glob("*.safetensors") for key, tensor in load_file(file).items()}
    for layer in range(json.loads((source / "config.json").read_text())["num_hidden_layers"]):
        for part, scale in SCALES.items():
            tensors[f"model.layers.{layer}.self_attn.{name.format(part=part)}"] = np.full(shape, scale, np.float32)
    tensors.pop(missing, None)
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_fp8(path: Path, **options: Any) -> LLM:
    return make_llm(replace(load_case(CASE), path=path), **({"kv_cache_dtype": "fp8"} | options))


def relative_error(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.slow
def test_fp8_pages_are_close_with_and_without_scales(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engines: Engines
) -> None:
    exact = first_logits(engines.get(make_llm, CASE))
    with caplog.at_level(logging.WARNING):
        plain = make_llm(CASE, kv_cache_dtype="fp8")
    assert "no scales" in caplog.text
    assert plain.ready.runner.device.cache[0].dtype == jnp.float8_e4m3fn
    assert 1e-4 < relative_error(first_logits(plain), exact) < 0.4, "random weights amplify what rounding does"

    caplog.clear()
    scaled = make_fp8(add_scales(tmp_path / "per-layer", "{part}_scale", (1,)))
    assert "no scales" not in caplog.text
    layer = scaled.ready.runner.params["layers"][0]
    assert layer["k_scale"].dtype == jnp.float32
    assert np.asarray(layer["k_scale"]).tolist() == [np.float32(SCALES["k"])] * len(layer["k_scale"])
    error = relative_error(first_logits(scaled), exact)
    assert 1e-4 < error < 0.4, "scales that were lost would show as a factor of fifty"


@pytest.mark.thorough
def test_latents_have_one_scale(tmp_path: Path) -> None:
    exact = first_logits(make_llm(LATENT_CASE), LATENT_CASE)
    scaled = make_fp8(add_scales(tmp_path / "latents", "{part}_scale", (), case=LATENT_CASE))
    layer = scaled.ready.runner.params["layers"][0]
    assert np.asarray(layer["k_scale"]).tolist() == [np.float32(SCALES["k"])] and "v_scale" not in layer
    assert 1e-4 < relative_error(first_logits(scaled, LATENT_CASE), exact) < 0.4


@pytest.mark.slow
@pytest.mark.thorough
def test_scales_are_found_by_their_other_name_per_head_and_ignored_without_fp8(tmp_path: Path) -> None:
    heads = json.loads((load_case(CASE).path / "config.json").read_text())["num_key_value_heads"]
    path = add_scales(tmp_path / "per-head", "{part}_proj.{part}_scale", (heads,))
    assert "v_scale" in make_fp8(path).ready.runner.params["layers"][1]
    assert "v_scale" not in make_fp8(path, kv_cache_dtype="auto").ready.runner.params["layers"][1]


def test_half_a_set_of_scales_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    missing = "model.layers.1.self_attn.v_scale"
    with pytest.raises(WeightsError, match=missing.replace(".", r"\.")):
        make_fp8(add_scales(tmp_path / "half", "{part}_scale", (), missing=missing))
