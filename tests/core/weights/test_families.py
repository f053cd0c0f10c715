"""The real families: every golden checkpoint loads completely, and converts to Orbax and back."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.core.weights import (
    checkpoint_format,
    load_safetensors,
    read_generation_config,
    read_hf_config,
    restore_params,
)
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from tests.core.weights.checkpoints import flatten_arrays, one_device, write_single
from tests.golden_cases import CASES, GOLDENS

SCRIPT = Path(__file__).parents[3] / "scripts" / "convert_checkpoint.py"


def load(path: Path, dtype: str | None = None) -> dict[str, Any]:
    config = parse_config(read_hf_config(path))
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    return load_safetensors(
        path,
        param_specs(config),
        weight_sources(config),
        ignored_weights(config),
        mesh=one_device(),
        rules=DEFAULT_RULES,
    )


@pytest.mark.parametrize("name", [name for name in CASES if "mxfp4" not in name])
def test_every_number_arrives_once(name: str) -> None:
    """Fusing and transposing only moves numbers: sorted, they are those of the files."""
    checkpoint = open_checkpoint(GOLDENS / name)
    stored = np.concatenate([checkpoint.read(tensor).astype(np.float32).ravel() for tensor in checkpoint.names])
    loaded = np.concatenate([value.ravel() for value in flatten_arrays(load(GOLDENS / name, "float32")).values()])
    np.testing.assert_array_equal(np.sort(stored), np.sort(loaded))


def test_stored_copy_of_a_tied_head_is_read_as_one(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "llama_tied", tmp_path, dirs_exist_ok=True)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for file in tmp_path.glob("model*"):
        file.unlink()
    load(write_single(tmp_path, tensors))
    with pytest.raises(WeightsError, match=r"'model\.embed\.weight'"):
        load(write_single(tmp_path, tensors | {"model.embed.weight": np.ones(1, np.float32)}))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_checkpoint", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_convert(script: ModuleType, tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    shutil.copytree(GOLDENS / "llama_gqa", source)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("")
    assert script.main([str(source), str(destination), "--dtype", "bfloat16"]) == 0
    assert checkpoint_format(destination) == "orbax"
    assert sorted(file.name for file in destination.iterdir()) == [
        "config.json",
        "generation_config.json",
        "params",
        "tokenizer.json",
    ]
    config = parse_config(read_hf_config(destination))
    assert config.dtype == "bfloat16" and config == parse_config({**read_hf_config(source), "dtype": "bfloat16"})
    assert read_generation_config(destination) == read_generation_config(source)
    restored = restore_params(destination, param_specs(config), mesh=one_device(), rules=DEFAULT_RULES)
    assert {leaf.dtype for leaf in jax.tree.leaves(restored)} == {np.dtype(ml_dtypes.bfloat16)}
    jax.tree.map(np.testing.assert_array_equal, restored, load(source, "bfloat16"))


def test_convert_refuses(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(GOLDENS / "llama_gqa")
    assert script.main([source, str(tmp_path / "a"), "--tensor-parallel-size", "1000"]) == 1
    assert "tensor_parallel_size" in capsys.readouterr().err
    assert script.main([str(tmp_path / "absent"), str(tmp_path / "b")]) == 1
    assert "there is no directory" in capsys.readouterr().err
    (tmp_path / "c" / "params").mkdir(parents=True)
    assert script.main([source, str(tmp_path / "c")]) == 1
    assert "already exists" in capsys.readouterr().err
    hf_config = json.loads((GOLDENS / "llama_head16_kv1" / "config.json").read_text())
    heads = hf_config["num_attention_heads"]
    with pytest.raises(ConfigError, match="copies of 1 KV heads"):
        script.parse_model({**hf_config, "intermediate_size": heads * 8}, heads)


def test_convert_help() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "--tensor-parallel-size" in done.stdout
