"""A head in files whose config ties it: it is the embedding, or it is used, or it is an error."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import CheckpointUpdate, load_safetensors, read_hf_config, untie_head
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.errors import WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from jaxserve.features.speculation.drafters.files import read_drafter
from tests.core.weights.checkpoints import one_device, write_single
from tests.golden_cases import load_case
from tests.quantized_files import METHODS, write_file, write_quantized

TIED = ("llama_tied", "gemma2", "gemma3_text", "gemma4_text", "cohere", "cohere2", "smollm3", "starcoder2")
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def write_head(case: str, folder: Path, change: Any) -> Path:
    """A copy of a case's files, with the head that `change` makes of the embedding, and a config that ties it."""
    source = load_case(case).path
    checkpoint = open_checkpoint(source)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names if name != HEAD}
    head = change(tensors[EMBED])
    write_single(folder, tensors | ({} if head is None else {HEAD: head}))
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(path: Path, model: DecoderConfig) -> dict[str, Any]:
    arguments = param_specs(model), weight_sources(model), ignored_weights(model)
    return load_safetensors(path, *arguments, mesh=one_device(), rules=DEFAULT_RULES)


def change_one(embed: np.ndarray) -> np.ndarray:
    """The last number alone differs."""
    head = embed.copy()
    head[-1, -1] += 1
    return head


@pytest.mark.parametrize("case", TIED)
def test_a_head_of_other_numbers_is_used(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_head(case, tmp_path, change_one)
    tied = parse_config(read_hf_config(path))
    model = untie_head(tied, path)
    assert tied.embedding.tied and not model.embedding.tied
    assert f"{HEAD} differs from {EMBED}" in caplog.text
    params = load(path, model)
    embed, head = (np.asarray(params[name]["weight"]) for name in ("embed", "lm_head"))
    assert (embed != head).sum() == 1 and embed[-1, -1] != head[-1, -1]
    with pytest.raises(WeightsError, match=r"differs from .* tie_word_embeddings: false"):
        load(path, tied)


@pytest.mark.parametrize("change", [np.copy, lambda embed: embed.astype(np.float32), lambda embed: None])
def test_a_head_of_equal_numbers_is_the_embedding(change: Any, tmp_path: Path) -> None:
    path = write_head("llama_tied", tmp_path, change)
    tied = parse_config(read_hf_config(path))
    assert untie_head(tied, path) == tied
    assert "lm_head" not in load(path, tied)


def test_numbers_are_equal_as_the_engine_holds_them(tmp_path: Path) -> None:
    path = write_head("llama_bf16", tmp_path, lambda embed: embed.astype(np.float32) * np.float32(1 + 1e-6))
    tied = parse_config(read_hf_config(path))
    assert tied.dtype == "bfloat16" and untie_head(tied, path) == tied
    path = write_head("llama_bf16", tmp_path / "other", lambda embed: (embed * 1.5).astype(ml_dtypes.bfloat16))
    assert not untie_head(tied, path).embedding.tied


def test_a_head_of_another_shape_is_an_error(tmp_path: Path) -> None:
    path = write_head("llama_tied", tmp_path, lambda embed: embed[:-1])
    tied = parse_config(read_hf_config(path))
    for check in (lambda: untie_head(tied, path), lambda: load(path, tied)):
        with pytest.raises(WeightsError, match=r"has shape .* ties it to model\.embed_tokens\.weight") as caught:
            check()
        assert caught.value.field == HEAD


def test_a_quantized_head_is_expanded(tmp_path: Path) -> None:
    path, _ = write_quantized(load_case("llama_tied").path, tmp_path, METHODS["fp8 tensors, older name"])
    checkpoint = open_checkpoint(path)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    tensors[HEAD] = tensors[EMBED].astype(ml_dtypes.float8_e4m3fn)
    tensors["lm_head.weight_scale"] = np.float32([2.0])
    write_file(path / "model.safetensors", tensors)
    model = untie_head(parse_config(read_hf_config(path)), path)
    head = np.asarray(load(path, model)["lm_head"]["weight"])
    np.testing.assert_array_equal(head, 2 * tensors[HEAD].astype(np.float32))


def test_a_head_of_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = write_head("llama_tied", tmp_path, lambda embed: embed.astype(np.float64))
    with pytest.raises(WeightsError, match="is stored as F64") as caught:
        load(path, untie_head(parse_config(read_hf_config(path)), path))
    assert caught.value.field == HEAD


def test_new_weights_with_a_head_of_their_own_are_refused_before_any_is_written(tmp_path: Path) -> None:
    path = write_head("llama_tied", tmp_path, change_one)
    tied = parse_config(read_hf_config(path))
    arguments = param_specs(tied), weight_sources(tied), ignored_weights(tied)
    with pytest.raises(WeightsError, match="differs from"):
        CheckpointUpdate(path, *arguments, make_mesh(1), DEFAULT_RULES).check()


def test_draft_models_have_their_own_head(tmp_path: Path) -> None:
    path = write_head("llama_tied", tmp_path, change_one)
    target = parse_config(read_hf_config(path))
    assert not read_drafter("draft_model", path, target).config.embedding.tied


def test_weights_that_are_not_used_are_no_remark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old files hold rotary frequencies, which are no weights."""
    caplog.set_level(logging.INFO)
    shutil.copytree(load_case("deepseek_v3").path, tmp_path, dirs_exist_ok=True)
    model = parse_config(read_hf_config(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    layer = f"model.layers.{model.num_layers}"
    tensors |= {f"{layer}.eh_proj.weight": np.ones((2, 4), np.float32), f"{layer}.norm.weight": np.ones(2, np.float32)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    for file in tmp_path.glob("model*"):
        file.unlink()
    jax.block_until_ready(load(write_single(tmp_path, tensors), model))
    found = {record.levelname: record.getMessage() for record in caplog.records if "of the checkpoint" in record.msg}
    assert f"1 tensors of the checkpoint hold weights that the model does not use: '{layer}.eh_proj" in found["WARNING"]
    assert found["INFO"].startswith("2 tensors of the checkpoint are not in the language model")
