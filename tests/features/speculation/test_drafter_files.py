"""The files of drafters: what is read from them, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.rope import Llama3Scaling
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import make_dummy_params
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import parse_config
from jaxserve.features.speculation.drafters.base import DrafterModel, expand_drafter_heads
from jaxserve.features.speculation.drafters.files import (
    check_tokenizers,
    load_drafter,
    read_drafter,
    resolve_drafter,
)
from jaxserve.features.speculation.drafters.tables import drafter_param_specs
from tests.families.naive import make_tensors
from tests.features.speculation.drafters import (
    DRAFT_V,
    HEAD,
    MIMO,
    TARGET,
    D,
    Tensors,
    V,
    make_head,
    make_mtp,
    read_target,
    write_files,
)

FIELD = "speculative_config.model"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
Change = Mapping[str, Any]
UNCHANGED: Change = MappingProxyType({})


def read_head(
    folder: Path, change: Change = UNCHANGED, tensors: Tensors | None = None, target: Change = UNCHANGED
) -> DrafterModel:
    config = {key: value for key, value in (HEAD | change).items() if value is not ...}
    write_files(folder, config, tensors or make_head())
    return read_drafter("eagle3", folder, read_target(TARGET | target))


def load(model: DrafterModel, folder: Path) -> Any:
    return load_drafter(model, folder, mesh=make_mesh(1), rules=DEFAULT_RULES)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, (2, 4, 6)),  # of 9: 2, n // 2, n - 3
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}, (2, 5, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, (1, 5, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (2, 4, 6)),  # the default of those that count outputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, (2, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 6, 9], "use_aux_hidden_state": True}}, (3, 6, 9)),
    ],
)
def test_layers_are_counted_as_the_file_means_them(tmp_path: Path, change: Change, layers: tuple[int, ...]):
    assert read_head(tmp_path / "head", change).aux_layers == layers


def test_what_other_tools_write_is_understood(tmp_path: Path):
    modelopt = {
        "eagle_aux_hidden_state_layer_ids": [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    plain = read_head(tmp_path / "plain")
    assert read_head(tmp_path / "modelopt", {"eagle_config": modelopt, "rope_scaling": None}) == plain
    qwen = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "pretraining_tp": 1}
    assert read_head(tmp_path / "specforge", qwen | {"use_cache": True, "attention_dropout": 0.0}) == plain
    assert read_head(tmp_path / "authors", {"architectures": ["LlamaForCausalLM"]}) == plain


def test_the_trained_length_of_a_head_bounds_nothing(tmp_path: Path):
    model = read_head(tmp_path / "head")
    assert model.config.max_model_len == 64 > HEAD["max_position_embeddings"]
    assert model.config.windows == (None,) and model.config.dtype == "float32"


def test_a_head_without_rope_scaling_gets_the_targets(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        model = read_head(tmp_path / "head", target={"rope_scaling": LLAMA3, "head_dim": 8})
    rope = model.config.layers[0].rope
    assert isinstance(rope.scaling, Llama3Scaling) and rope.theta == 10000.0
    assert "rope_scaling" in caplog.text
    own = read_head(tmp_path / "own", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, target={"head_dim": 8})
    assert own.config.layers[0].rope.scaling.factor == 2.0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"vocab_size": 41}, "vocab_size"),
        ({"hidden_size": 32}, "hidden_size"),
        ({"target_hidden_size": 32}, "hidden_size"),
        ({"draft_vocab_size": V + 1}, "draft_vocab_size"),
        ({"architectures": ["EAGLEModel"]}, "EAGLE-1"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "EAGLE-1"),
        ({"architectures": ["MedusaModel"]}, "MedusaModel"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"hidden_act": "elu"}, "hidden_act"),
        ({"sharpness": 3}, "sharpness"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "fc.weight"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 6]}, "growing"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 10]}, "from 0 to 9"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"sharpness": 3}}, "sharpness"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"num_hidden_layers": 2}, "layers.1"),
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"intermediate_size": 21}, "mlp"),
    ],
)
def test_a_config_that_cannot_work_is_refused(tmp_path: Path, change: Change, word: str):
    with pytest.raises((ConfigError, WeightsError), match=word) as caught:
        read_head(tmp_path / "head", change)
    assert caught.value.field == FIELD and str(tmp_path) in str(caught.value)


def test_a_target_whose_depth_has_no_default_layers_needs_the_key(tmp_path: Path):
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
        read_head(tmp_path / "head", target={"num_hidden_layers": 4})


def change_tensors(**changes: np.ndarray | None) -> Tensors:
    """The head's tensors with some replaced or left out; `__` stands for a dot."""
    tensors = make_head() | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (change_tensors(d2t=None), "d2t"),
        (change_tensors(norm__weight=None), "norm.weight"),
        (change_tensors(lm_head__weight=None), "lm_head"),
        (change_tensors(extra__weight=np.ones(3, np.float32)), "extra.weight"),
        (change_tensors(layers__0__hidden_norm__weight=np.ones(D, np.float32)), "layers.0.hidden_norm.weight"),
        (change_tensors(midlayer__hidden_norm__weight=None, fc__weight=np.ones((D, 2 * D), np.float32)), "EAGLE-1"),
        (change_tensors(fc__weight=None), "draft_model"),
        (change_tensors(d2t=np.zeros(3, np.int64)), "d2t"),
        (change_tensors(d2t=np.zeros(DRAFT_V, np.float32)), "d2t"),
        (change_tensors(t2d=np.zeros(3, bool)), "t2d"),
        (change_tensors(norm__weight=np.ones(D, np.int64)), "norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_is_read(tmp_path: Path, tensors: Tensors, word: str):
    with pytest.raises((ConfigError, WeightsError), match=word) as caught:
        read_head(tmp_path / "head", tensors=tensors)
    assert caught.value.field == FIELD


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (change_tensors(norm__weight=np.full(D, np.nan, np.float32)), "norm.weight.*NaN"),
        (change_tensors(midlayer__mlp__down_proj__weight=np.full((D, 20), np.inf, np.float32)), "down_proj"),
        (change_tensors(d2t=np.full(DRAFT_V, 30)), "outside"),
        (change_tensors(d2t=-np.arange(DRAFT_V)), "two draft tokens"),
        (change_tensors(t2d=np.arange(V) < DRAFT_V), "t2d"),
    ],
)
def test_damaged_values_are_refused(tmp_path: Path, tensors: Tensors, word: str):
    model = read_head(tmp_path / "head", tensors=tensors)
    with pytest.raises(WeightsError, match=word) as caught:
        load(model, tmp_path / "head")
    assert caught.value.field == FIELD


def test_a_head_may_share_the_targets_head_and_have_another_size(tmp_path: Path):
    shared = read_head(
        tmp_path / "shared", {"draft_vocab_size": ...}, change_tensors(d2t=None, t2d=None, lm_head__weight=None)
    )
    assert not shared.has_head and not shared.maps_vocab and shared.draft_vocab_size == V
    with pytest.raises(ConfigError, match="its own embed_tokens"):
        read_head(tmp_path / "small", {"hidden_size": 8, "target_hidden_size": D})


def test_a_mesh_divides_what_it_can(tmp_path: Path):
    model = read_head(tmp_path / "head")
    expanded = expand_drafter_heads(model, 4)
    assert expanded.config.layers[0].attention.num_kv_heads == 4 and expanded.shard_draft_vocab
    assert not expand_drafter_heads(dataclasses.replace(model, draft_vocab_size=23), 4).shard_draft_vocab
    with pytest.raises(ConfigError) as caught:
        expand_drafter_heads(model, 3)
    assert caught.value.field == FIELD
    hash(model)


def test_dummy_parameters_map_each_draft_to_itself(tmp_path: Path):
    model = read_head(tmp_path / "head")
    params = make_dummy_params(drafter_param_specs(model), mesh=make_mesh(1), rules=DEFAULT_RULES, seed=0)
    assert params["d2t"]["weight"].dtype == jnp.int32 and not params["d2t"]["weight"].any()


def test_mtp_is_in_the_targets_own_checkpoint(tmp_path: Path):
    folder = write_files(tmp_path / "mimo", MIMO, make_mtp() | make_mtp("model.mtp_layers.1"))
    model = read_drafter("mtp", folder, read_target(MIMO))
    assert set(load(model, folder)["layers"][0]) >= {"input_proj", "qkv", "out_norm"}
    with pytest.raises(ConfigError) as caught:
        read_drafter("mtp", folder, read_target())
    assert caught.value.field == "speculative_config.method"
    write_files(folder, MIMO | {"num_nextn_predict_layers": 0}, make_mtp())
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        read_drafter("mtp", folder, read_target(MIMO))
    lacking = {name: tensor for name, tensor in make_mtp().items() if "input_proj" not in name}
    with pytest.raises(WeightsError, match="input_proj") as missing:
        read_drafter("mtp", write_files(folder, MIMO, lacking), read_target(MIMO))
    assert missing.value.field == FIELD


def write_draft_model(folder: Path, change: Change = UNCHANGED) -> Path:
    raw = TARGET | {"num_hidden_layers": 1} | change
    return write_files(folder, raw, make_tensors(parse_config(raw), seed=1))


def test_a_draft_model_serves_the_targets_length(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_draft_model(tmp_path / "draft", {"max_position_embeddings": 16})
    with caplog.at_level(logging.WARNING):
        model = read_drafter("draft_model", folder, read_target())
    assert "16" in caplog.text and model.config.max_model_len == 64
    assert model.aux_layers == () and not model.takes_next and model.count_ahead(4) == 4


def test_a_draft_model_that_cannot_work_is_refused(tmp_path: Path):
    other = write_draft_model(tmp_path / "other", {"vocab_size": 41})
    with pytest.raises(ConfigError, match="vocab_size") as caught:
        read_drafter("draft_model", other, read_target())
    assert caught.value.field == FIELD
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    folder = write_draft_model(tmp_path / "windows", mistral)
    with pytest.raises(ConfigError, match="last 16 tokens"):
        read_drafter("draft_model", folder, read_target())
    target = read_target(TARGET | mistral)
    assert read_drafter("draft_model", folder, target).config.windows == (16,)
    with pytest.raises(ConfigError, match="all tokens"):
        read_head(tmp_path / "head", target=mistral)


def test_tokenizers_must_agree(tmp_path: Path):
    folders = [tmp_path / name for name in ("draft", "target")]
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [], "normalizer": None}
    for folder, normalizer in zip(folders, (None, {"type": "NFC"}), strict=True):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": normalizer}))
    check_tokenizers(*folders)
    (folders[0] / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": [{"id": 1, "content": "<s>"}]}))
    write_draft_model(folders[0])
    with pytest.raises(ConfigError, match="tokenizer") as caught:
        read_drafter("draft_model", folders[0], read_target(), target_path=folders[1])
    assert caught.value.field == FIELD


def test_a_directory_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        resolve_drafter(str(tmp_path / "nowhere"))
    assert caught.value.field == FIELD
