"""Checkpoint names and the layouts built from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import load_safetensors
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from tests.families.naive import NaiveRunner, build_params, make_tensors, read_tensors
from tests.golden_cases import CASES, load_case

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "attention_bias": True,
    "mlp_bias": True,
}


def list_paths(tree: dict[str, object]) -> set[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path) for path, _ in leaves}


@pytest.mark.parametrize("name", CASES)
def test_sources_cover_specs_and_checkpoint_exactly(name: str):
    case = load_case(name)
    config, tensors = parse_config(case.config), read_tensors(case.path)
    sources = {path: source.choose(tensors.keys()) for path, source in weight_sources(config).items()}
    assert set(sources) == list_paths(param_specs(config))
    names = [tensor for source in sources.values() if not source.part for tensor in source.names]
    shared = {tensor for source in sources.values() if source.part for tensor in source.names}
    assert sorted([*names, *shared]) == sorted(tensors)
    for source in sources.values():
        assert source.shapes == tuple(tensors[tensor].shape for tensor in source.names)


def test_qkv_holds_each_kv_head_with_its_queries():
    config = parse_config(TINY)
    tensors = make_tensors(config, seed=0)
    prefix = "model.layers.1.self_attn"
    for leaf, suffix in (("qkv.weight", "weight"), ("qkv.bias", "bias")):
        source = weight_sources(config)[f"layers.1.{leaf}"]
        built = np.asarray(source.build(*(tensors[name] for name in source.names)))
        built = built.reshape(*built.shape[:-1], 3, 4, 4)
        q, k, v = (tensors[f"{prefix}.{part}_proj.{suffix}"] for part in "qkv")
        for kv_head in range(3):
            for slot, rows in enumerate(
                [q[8 * kv_head : 8 * kv_head + 4], q[8 * kv_head + 4 : 8 * kv_head + 8]]
                + [part[4 * kv_head : 4 * kv_head + 4] for part in (k, v)]
            ):
                np.testing.assert_array_equal(built[..., kv_head, slot, :], rows.T)


def test_expansion_repeats_each_kv_head_beside_its_queries():
    config = parse_config(TINY)
    wide = fit_devices(config, 6)
    assert wide.layers[0].attention.num_kv_heads == 6 and wide.layers[0].attention.group_size == 1
    assert param_specs(wide)["layers"][0]["qkv"]["weight"].shape == (8, 6 * 3 * 4)
    tensors = make_tensors(config, seed=1)
    source, wide_source = (weight_sources(c)["layers.0.qkv.weight"] for c in (config, wide))
    assert source.names == wide_source.names and source.shapes == wide_source.shapes
    narrow_qkv = np.asarray(source.build(*(tensors[name] for name in source.names))).reshape(8, 3, 4, 4)
    wide_qkv = np.asarray(wide_source.build(*(tensors[name] for name in source.names))).reshape(8, 6, 3, 4)
    for head in range(6):
        np.testing.assert_array_equal(wide_qkv[:, head, 0], narrow_qkv[:, head // 2, head % 2])
        np.testing.assert_array_equal(wide_qkv[:, head, 1:], narrow_qkv[:, head // 2, 2:])


def test_other_layouts_are_plain_transposes():
    config = parse_config(TINY)
    tensors, sources = make_tensors(config, seed=2), weight_sources(config)
    prefix = "model.layers.0"

    def build(leaf: str) -> np.ndarray:
        source = sources[f"layers.0.{leaf}"]
        return np.asarray(source.build(*(tensors[name] for name in source.names)))

    np.testing.assert_array_equal(build("o.weight"), tensors[f"{prefix}.self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(build("down.weight"), tensors[f"{prefix}.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(build("gate_up.weight")[0], tensors[f"{prefix}.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(build("gate_up.weight")[1], tensors[f"{prefix}.mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(build("gate_up.bias")[1], tensors[f"{prefix}.mlp.up_proj.bias"])


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [("llama", "model.layers.1.mlp.act_fn"), ("phi3", "model.layers.1.mlp.activation_fn")],
)
def test_an_activations_own_parameters_are_read(architecture: str, prefix: str, tmp_path: Path):
    """As transformers saves them: two parameters of one element, two buffers without an axis."""
    tiny = {key: value for key, value in TINY.items() if not key.endswith("_bias")}
    config = parse_config(tiny | {"model_type": architecture, "hidden_act": "xielu", "dtype": "bfloat16"})
    tensors = make_tensors(config, seed=3)
    assert {name.removeprefix(f"{prefix}."): tensor.shape for name, tensor in tensors.items() if prefix in name} == {
        "alpha_p": (1,),
        "alpha_n": (1,),
        "beta": (),
        "eps": (),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    act = load_safetensors(
        tmp_path, param_specs(config), weight_sources(config), mesh=make_mesh(1), rules=DEFAULT_RULES
    )["layers"][1]["act"]
    np.testing.assert_array_equal(
        act, [tensors[f"{prefix}.{name}"].item() for name in ("alpha_p", "alpha_n", "beta", "eps")]
    )
    assert act.dtype == np.float32, "eps and the like are not rounded to the model's 16 bits"


def test_a_learned_slope_is_a_leaky_relu():
    learned, fixed = (parse_config(TINY | {"hidden_act": name}) for name in ("prelu", "leaky_relu"))
    tensors = make_tensors(fixed, seed=4)
    slopes = {f"model.layers.{layer}.mlp.act_fn.weight": np.full(1, 0.01, np.float32) for layer in range(2)}
    text = [[3, 1, 4, 1, 5, 9, 2, 6]]
    logits, expected = (
        NaiveRunner(config.with_max_model_len(16), build_params(config, tensors | slopes), 1).run(text)[0]
        for config in (learned, fixed)
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_tensors_keep_their_dtype_and_bits(dtype: type):
    config = replace(parse_config(TINY | {"hidden_size": 40, "intermediate_size": 70}), dtype="bfloat16")
    source = weight_sources(config)["layers.0.down.weight"]
    tensor = np.random.default_rng(0).standard_normal((40, 70)).astype(dtype)
    built = np.asarray(source.build(tensor))
    assert built.dtype == dtype and built.flags.c_contiguous
    np.testing.assert_array_equal(built.view(np.uint8), np.ascontiguousarray(tensor.T).view(np.uint8))


def test_ignored_weights_are_known_by_name_only():
    def is_ignored(config: dict[str, object], name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in ignored_weights(parse_config(config)))

    assert is_ignored(TINY, "model.layers.7.self_attn.rotary_emb.inv_freq")
    assert is_ignored(TINY, "model.layers.7.self_attn.k_scale"), "pages of 16 bits need no scales"
    assert is_ignored(TINY, "model.layers.7.self_attn.v_proj.v_scale")
    assert not is_ignored(TINY, "model.layers.7.self_attn.v_proj.weight_scale")
    assert not is_ignored(TINY, "lm_head.weight")
    assert is_ignored(TINY | {"tie_word_embeddings": True}, "lm_head.weight")
    assert not is_ignored(TINY | {"tie_word_embeddings": True}, "lm_head_weight")


def test_multimodal_gemma3_names():
    folder = Path(__file__).resolve().parents[2] / "configs" / "models"
    text = json.loads((folder / "gemma-3-1b.json").read_text())
    config = parse_config({"model_type": "gemma3", "text_config": text})
    names = {name for source in weight_sources(config).values() for name in source.names}
    assert "language_model.model.layers.25.self_attn.q_norm.weight" in names
    assert all(name.startswith("language_model.model.") for name in names)
    assert any(re.fullmatch(pattern, "vision_tower.x.weight") for pattern in ignored_weights(config))
