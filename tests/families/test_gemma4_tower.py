"""Gemma 4's tower: its config as published, bounds of products, and which tokens of images see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core.layers.stack import StackMode, stack_specs
from jaxserve.core.models.layouts import order_quarters
from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import make_dummy_params
from jaxserve.core.weights.tower import load_tower
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import parse_config
from jaxserve.families.towers import TOWERS, parse_tower, tower_param_specs
from tests.families.towers import FOLDER, find_processor, read_images, read_raw, read_tower

NAME = "gemma4"
# Of gemma-4-31B-it, where a key differs from the tiny model's.
PUBLISHED: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "global_head_dim": 72,
    "default_output_length": 280,
    "chunk_size_feed_forward": 0,
    "position_embedding_size": 10240,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "use_clipped_linears": False,
}


def parse(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **keys: Any) -> TowerConfig:
    """The tower of the tiny model with other keys; None takes one away."""
    raw = read_raw(NAME)
    for part, changes in (("vision_config", vision or {}), ("text_config", text or {})):
        merged = {key: value for key, value in (raw[part] | changes).items() if value is not None}
        raw[part] = merged
    return parse_tower(raw | keys, parse_config(raw), find_processor(NAME))


def load(folder: Path) -> Any:
    return load_tower(read_tower(NAME), folder, mesh=make_mesh(1, jax.devices()[:1]), rules=DEFAULT_RULES)


def test_the_published_tower_is_read() -> None:
    config = parse(PUBLISHED)
    (attention,) = config.blocks.attentions
    assert (attention.num_heads, attention.head_dim, attention.scale) == (16, 72, 1.0)
    assert (config.blocks.num_layers, config.merge_size, config.standardizes, config.clips) == (27, 2, True, False)
    assert config.rope is not None and (config.rope.rotary_dim, config.rope.theta) == (36, 100.0)
    assert set(tower_param_specs(config)["layers"][0]["qkv"]) == {"weight"}


def test_bounds_are_one_for_each_column() -> None:
    layer = tower_param_specs(read_tower(NAME))["layers"][1]
    shapes = {name: layer[name]["out_range"].shape for name in ("qkv", "o", "gate_up", "down")}
    assert shapes == {"qkv": (2, 2 * 3 * 16), "o": (2,), "gate_up": (2, 2, 1, 1), "down": (2,)}
    tensors = load_file(FOLDER / NAME / "model.safetensors")
    name = "model.vision_tower.encoder.layers.1.self_attn.{}_proj.output_{}"
    found = np.asarray(load(FOLDER / NAME)["layers"][1]["qkv"]["out_range"]).reshape(2, 2, 3, 16)
    for side, bound in enumerate(("min", "max")):
        for part, heads in zip("qkv", found[side].swapaxes(0, 1), strict=True):
            np.testing.assert_array_equal(heads, tensors[name.format(part, bound)])


@pytest.mark.parametrize("mode", ["unrolled", "stacked"])
def test_bounds_of_random_weights_leave_numbers_between_them(mode: StackMode) -> None:
    specs = stack_specs(tower_param_specs(read_tower(NAME)), mode)
    params = make_dummy_params(specs, mesh=make_mesh(1, jax.devices()[:1]), rules=DEFAULT_RULES, seed=0)
    for leaf in params["layers"][1].values():
        for low, high in (leaf[side] for side in ("in_range", "out_range") if side in leaf):
            assert (low < 0).all() and (high > 0).all()
    assert {"in_range", "out_range"} <= params["layers"][1]["qkv"].keys()


def test_products_that_are_one_must_have_one_bound(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / NAME / "model.safetensors")
    name = "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max"
    save_file(tensors | {name: np.asarray(tensors[name] + 1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"gate_proj, .*up_proj: bounds of what goes in must be equal, not 1.5, 2.5"):
        load(tmp_path)


def test_halves_of_a_head_that_rotate_apart_become_one() -> None:
    assert order_quarters(8).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize(("mode", "mutual"), [("vision", "windowed"), (None, None)])
def test_tokens_of_an_image_see_each_other_in_windows_of_large_models(mode: str | None, mutual: str | None) -> None:
    """E2B and E4B have causal masks everywhere, so their images may be cut and need no token between them."""
    assert parse(text={"use_bidirectional_attention": mode}).mutual == mutual
    raw = read_raw(NAME)
    raw["text_config"]["use_bidirectional_attention"] = mode
    assert TOWERS[NAME].tokens(raw).apart == (mutual is not None)


def test_tokens_around_an_image() -> None:
    tokens, item = TOWERS[NAME].tokens(read_raw(NAME)), read_images(NAME)[0][0]
    assert tokens.write("see <|image|>.", 1) == "see <|image><|image|><image|>."
    assert (tokens.placeholder_id, tokens.count(item), item.grid) == (80, 70, (1, 14, 20))
    assert TOWERS[NAME].tokens({"text_config": {}}).placeholder_id == 258880


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 18}, "head_dim"),
    ({"hidden_activation": "prelu"}, "hidden_activation"),
    ({"attention_bias": True}, "attention_bias"),
    ({"patch_size": 16}, "patch_size"),
    ({"pooling_kernel_size": 3}, "pooling_kernel_size"),
    ({"position_embedding_size": 139}, "position_embedding_size"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type"),
    ({"window_size": 112}, "window_size"),
]


@pytest.mark.parametrize(("keys", "field"), FAULTS, ids=[field for _, field in FAULTS])
def test_faults_of_a_config_are_named(keys: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(keys)
    assert caught.value.field == f"vision_config.{field}"


def test_images_have_the_layer_inputs_of_id_0() -> None:
    with pytest.raises(
        ConfigError, match="must be 0, got 3: tokens of images have the layer inputs of padding"
    ) as caught:
        parse(text={"pad_token_id": 3})
    assert caught.value.field == "text_config.pad_token_id"
    parse(text={"pad_token_id": 3, "hidden_size_per_layer_input": 0})


def test_the_model_without_a_tower_is_refused_by_its_kind() -> None:
    with pytest.raises(ConfigError, match="its images have no tower; gemma4 is served") as caught:
        parse_config({"model_type": "gemma4_unified", "text_config": {}, "vision_config": {"x": 1}})
    assert caught.value.field == "model_type"
