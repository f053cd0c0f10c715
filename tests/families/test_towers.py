"""Towers: the vectors that transformers makes, whatever shares the program, and files that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core.models.hf_config import override_config
from jaxserve.core.runtime.tower import choose_tower_impl, fit_tower
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import make_dummy_params
from jaxserve.core.weights.tower import load_tower
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import parse_config
from jaxserve.families.towers import TOWERS, parse_tower, tower_param_specs
from jaxserve.media.processors import FAMILIES
from tests.families.towers import (
    CASES,
    FOLDER,
    TowerRunner,
    find_processor,
    read_images,
    read_raw,
    read_tower,
)

TOLERANCE = 1e-4  # of the largest number


def check_near(found: list[np.ndarray], expected: Any, share: float = TOLERANCE) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=share * np.abs(other).max())


@pytest.fixture(scope="module", params=CASES)
def runner(request: pytest.FixtureRequest) -> TowerRunner:
    name = request.param
    return TowerRunner(read_tower(name), FOLDER / name, impl="cpu")


def test_vectors_are_those_of_transformers(runner: TowerRunner) -> None:
    items, expected = read_images(runner.config.blocks.family)
    assert runner.config.num_parts == expected[0].shape[1]
    for item, vectors in zip(items, expected, strict=True):
        check_near(runner.run([item]), [vectors])


def test_images_beside_each_other_are_as_alone(runner: TowerRunner) -> None:
    items, expected = read_images(runner.config.blocks.family)
    check_near(runner.run(items), expected)
    check_near(runner.run(items[::-1]), expected[::-1])
    check_near(runner.run([items[1]] * 3), [expected[1]] * 3)


def test_padding_changes_nothing(runner: TowerRunner) -> None:
    items, _ = read_images(runner.config.blocks.family)
    plain = runner.run(items[:3])
    for seed in range(2):
        for one, other in zip(runner.run(items[:3], seed=seed), plain, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4"])
def test_stacked_layers_run_in_a_loop(name: str) -> None:
    """As on TPUs; of the first, vectors of layers in the middle are outputs, too."""
    items, expected = read_images(name)
    check_near(TowerRunner(read_tower(name), FOLDER / name, mode="stacked").run(items), expected)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_near(name: str) -> None:
    items, expected = read_images(name)
    runner = TowerRunner(read_tower(name, "bfloat16"), FOLDER / name)
    assert runner.params["layers"][0]["qkv"]["weight"].dtype == "bfloat16"
    # Bounds and the final scale of this one spread roundings: transformers' own are 0.22 of the largest number apart.
    check_near(runner.run(items), expected, 0.2 if name == "gemma4" else 0.06)


def test_towers_have_processors_and_families() -> None:
    for family, tower in TOWERS.items():
        assert tower.processor in FAMILIES
        assert read_tower(family).blocks.family == family


def test_tokens_of_images() -> None:
    tokens = TOWERS["qwen3_vl"].tokens(read_raw("qwen3_vl"))
    assert (tokens.mark, tokens.placeholder, tokens.placeholder_id) == ("<|image_pad|>", "<|image_pad|>", 80)
    item = read_images("qwen3_vl")[0][0]
    assert tokens.count(item) == item.num_tokens
    with pytest.raises(ConfigError, match="image_token_id"):
        TOWERS["qwen3_vl"].tokens({})


def test_tokens_around_images_of_gemma() -> None:
    tower, item = TOWERS["gemma3"], read_images("gemma3")[0][0]
    tokens = tower.tokens(read_raw("gemma3"))
    text = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    assert tokens.write("see <start_of_image>.", 1) == f"see {text}."
    assert (tokens.placeholder_id, tokens.count(item)) == (80, 9)
    assert tower.tokens({"image_token_id": 7}).placeholder_id == 7
    assert tower.tokens({}).placeholder_id == 262144
    with pytest.raises(ConfigError, match="image_token_index"):
        tower.tokens({"image_token_index": "7"})


@pytest.mark.parametrize(("name", "merge_size"), [("mistral3", 2), ("llava", 1)])
def test_rows_of_pixtrals_images_have_ends(name: str, merge_size: int) -> None:
    tower, item = TOWERS[name], read_images(name)[0][1]
    tokens = tower.tokens(read_raw(name)).find_ids({"[IMG]": 80, "[IMG_BREAK]": 81, "[IMG_END]": 82})
    (rows, columns) = (size // merge_size for size in item.grid[1:])
    ids, _ = tokens.expand([5, 80, 6], [item])
    assert ids == [5, *[*[80] * columns, 81] * (rows - 1), *[80] * columns, 82, 6]
    assert tokens.count(item) == item.num_tokens + rows
    with pytest.raises(ConfigError, match="image_token_id"):
        tower.tokens({"model_type": name})


def test_pixtrals_towers_share_their_parts() -> None:
    """Of one number of patches a side: the projector of Mistral Small 3 joins squares, behind the text model's norm."""
    merging, plain = read_tower("mistral3"), read_tower("llava")
    assert (merging.merge_size, plain.merge_size) == (2, 1)
    assert merging.merger_norm is not None and merging.merger_norm.eps == 1e-4 and plain.merger_norm is None
    assert merging.projector is not None and not merging.projector.bias
    assert plain.projector is not None and plain.projector.bias


PIXTRAL_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "clip_vision_model"}, "vision_config.model_type"),
    ({"num_hidden_layers": 10**9}, "vision_config.num_hidden_layers"),
    ({"num_attention_heads": 5}, "vision_config.num_attention_heads"),
    ({"head_dim": 64}, "vision_config.head_dim"),
    ({"hidden_act": "prelu"}, "vision_config.hidden_act"),
    ({"num_channels": 1}, "vision_config.num_channels"),
    ({"patch_size": 8}, "vision_config.patch_size"),
    ({"rope_theta": 0}, "vision_config.rope_theta"),
    ({"rope_parameters": {"rope_type": "linear"}}, "vision_config.rope_parameters.rope_type"),
    ({"window_size": 112}, "vision_config.window_size"),
]
# The keys around `vision_config`; None: the file has none, and the default is for another tower.
AROUND_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("mistral3", {"spatial_merge_size": 1}, "spatial_merge_size"),
    ("mistral3", {"vision_feature_layer": -2}, "vision_feature_layer"),
    ("mistral3", {"vision_feature_layer": [-1, -2]}, "vision_feature_layer"),
    ("mistral3", {"projector_hidden_act": "prelu"}, "projector_hidden_act"),
    ("mistral3", {"multimodal_projector_bias": 1}, "multimodal_projector_bias"),
    ("mistral3", {"vision_config": 5}, "vision_config"),
    ("llava", {"vision_feature_layer": None}, "vision_feature_layer"),
    ("llava", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
    ("llava", {"vision_feature_select_strategy": None}, "vision_feature_select_strategy"),
]


@pytest.mark.parametrize(
    ("name", "keys", "field"),
    [*(("mistral3", {"vision_config": keys}, field) for keys, field in PIXTRAL_FAULTS), *AROUND_FAULTS],
    ids=lambda value: str(value)[:40],
)
def test_faults_of_pixtrals_config_are_named(name: str, keys: dict[str, Any], field: str) -> None:
    raw = read_raw(name)
    text, processor = parse_config(raw), find_processor(name)
    if isinstance(keys.get("vision_config"), dict):
        keys = {"vision_config": raw["vision_config"] | keys["vision_config"]}
    changed = {key: value for key, value in (raw | keys).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        parse_tower(changed, text, processor)
    assert caught.value.field == field


def test_published_forms_of_pixtrals_config_are_read() -> None:
    """Older files have the base of the rotation beside the other keys, and Pixtral's leave out what is the default."""
    raw = read_raw("mistral3")
    vision = {key: value for key, value in raw["vision_config"].items() if key != "rope_parameters"}
    older = raw | {"vision_config": vision | {"rope_theta": 10000.0, "is_composition": True}}
    assert parse_tower(older, parse_config(older), find_processor("mistral3")) == read_tower("mistral3")
    defaults = parse_tower(
        read_raw("llava") | {"vision_config": {"model_type": "pixtral", "patch_size": 4, "hidden_act": "silu"}},
        parse_config(read_raw("llava")),
        find_processor("llava"),
    ).blocks
    attention = defaults.layers[0].mixer
    assert (defaults.hidden_size, defaults.num_layers) == (1024, 24)
    assert (attention.num_heads, attention.head_dim) == (16, 64)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"depth": None}, "depth"),
    ({"depth": 10**9}, "depth"),
    ({"num_heads": 5}, "num_heads"),
    ({"num_heads": 12}, "num_heads"),  # heads of two cannot rotate by halves
    ({"hidden_act": "prelu"}, "hidden_act"),
    ({"in_channels": 1}, "in_channels"),
    ({"patch_size": 8}, "patch_size"),
    ({"temporal_patch_size": 1}, "temporal_patch_size"),
    ({"spatial_merge_size": 1}, "spatial_merge_size"),
    ({"out_hidden_size": 48}, "out_hidden_size"),
    ({"num_position_embeddings": 60}, "num_position_embeddings"),
    ({"deepstack_visual_indexes": 1}, "deepstack_visual_indexes"),
    ({"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes"),
    ({"deepstack_visual_indexes": [1, 0]}, "deepstack_visual_indexes"),
    ({"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes"),
    ({"depth": 8, "deepstack_visual_indexes": [0, 1, 2, 3]}, "deepstack_visual_indexes"),  # the text has three layers
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta"),
    ({"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor"),
    ({"window_size": 112}, "window_size"),
]


@pytest.mark.parametrize(("keys", "field"), FAULTS, ids=[f"{field}={keys}"[:60] for keys, field in FAULTS])
def test_faults_of_a_config_are_named(keys: dict[str, Any], field: str) -> None:
    raw = read_raw("qwen3_vl")
    text, processor = parse_config(raw), find_processor("qwen3_vl")
    vision = {key: value for key, value in (raw["vision_config"] | keys).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        parse_tower(raw | {"vision_config": vision}, text, processor)
    assert caught.value.field == f"vision_config.{field}"
    advice = f"hf_overrides={{'vision_config': {{{field!r}: None}}}}"
    assert str(caught.value).replace(advice, "").count("vision_config") == 1


def test_the_refusal_of_a_towers_key_says_how_to_drop_it() -> None:
    raw = read_raw("qwen3_vl")
    found = {**raw, "vision_config": {**raw["vision_config"], "window_size": 112}}
    text, processor = parse_config(raw), find_processor("qwen3_vl")
    with pytest.raises(ConfigError, match=r"drop it by hf_overrides=\{'vision_config': \{'window_size': None\}\}"):
        parse_tower(found, text, processor)
    dropped = override_config(found, {"vision_config": {"window_size": None}})
    assert parse_tower(dropped, text, processor) == parse_tower(raw, text, processor)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("lacking", ["mrope_section", "mrope_interleaved"])
def test_images_need_positions_in_three_parts(name: str, lacking: str) -> None:
    raw = read_raw(name)
    rope = {key: value for key, value in raw["text_config"]["rope_parameters"].items() if key != lacking}
    text = raw | {"text_config": raw["text_config"] | {"rope_parameters": rope}}
    with pytest.raises(ConfigError, match="mrope_section") as caught:
        parse_tower(text, parse_config(text), find_processor(name))
    assert caught.value.field == "text_config.rope_parameters"


def test_later_towers_have_no_deep_layers() -> None:
    raw = read_raw("qwen3_5")
    for layers, is_read in (([], True), ([1], False)):
        changed = raw | {"vision_config": raw["vision_config"] | {"deepstack_visual_indexes": layers}}
        if is_read:
            assert parse_tower(changed, parse_config(raw), find_processor("qwen3_5")) == read_tower("qwen3_5")
            continue
        with pytest.raises(ConfigError) as caught:
            parse_tower(changed, parse_config(raw), find_processor("qwen3_5"))
        assert caught.value.field == "vision_config.deepstack_visual_indexes"


GEMMA_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": None}, "vision_config.num_hidden_layers"),
    ({"num_attention_heads": 5}, "vision_config.num_attention_heads"),
    ({"hidden_act": "prelu"}, "vision_config.hidden_act"),
    ({"num_channels": 1}, "vision_config.num_channels"),
    ({"image_size": 896}, "vision_config.image_size"),
    ({"patch_size": 12}, "vision_config.patch_size"),
    ({"vision_use_head": True}, "vision_config.vision_use_head"),
    ({"layer_norm_eps": 0}, "vision_config.layer_norm_eps"),
    ({"window_size": 112}, "vision_config.window_size"),
]


@pytest.mark.parametrize(("keys", "field"), GEMMA_FAULTS, ids=[field for _, field in GEMMA_FAULTS])
def test_faults_of_a_config_of_gemma_are_named(keys: dict[str, Any], field: str) -> None:
    raw = read_raw("gemma3")
    vision = {key: value for key, value in (raw["vision_config"] | keys).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        parse_tower(raw | {"vision_config": vision}, parse_config(raw), find_processor("gemma3"))
    assert caught.value.field == field


def test_tokens_of_a_config_are_those_of_the_processor() -> None:
    raw = read_raw("gemma3") | {"mm_tokens_per_image": 4}
    with pytest.raises(ConfigError, match="4 must be image_seq_length of the processor, 9") as caught:
        parse_tower(raw, parse_config(raw), find_processor("gemma3"))
    assert caught.value.field == "mm_tokens_per_image"


def test_a_config_without_a_tower_is_refused() -> None:
    raw = read_raw("qwen3_vl")
    for vision in (None, 5):
        with pytest.raises(ConfigError, match="vision_config"):
            parse_tower(raw | {"vision_config": vision}, parse_config(raw), find_processor("qwen3_vl"))


def test_devices_share_heads_or_are_refused() -> None:
    config = read_tower("qwen3_vl")
    assert fit_tower(config, 1) == config
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: of the tower .* sizes that work: \[1, 2\]"):
        fit_tower(config, 4)


def test_heads_that_kernels_cannot_take_have_portable_attention() -> None:
    odd, even = read_tower("qwen3_vl"), read_tower("qwen3_vl_moe")
    assert choose_tower_impl(even, "cpu", 1, "cpu")[0] == "cpu"
    impl, reason = choose_tower_impl(odd, "cpu", 1, "cpu")
    assert impl == "xla" and "not of 12" in reason
    assert choose_tower_impl(odd, "gpu", 1, "gpu")[0] == "xla"  # in float32
    assert choose_tower_impl(read_tower("qwen3_vl", "bfloat16"), "gpu", 1, "gpu")[0] == "gpu"
    assert choose_tower_impl(even, "tpu", 1, "tpu")[0] == "xla"


def write_files(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, name: str = "qwen3_vl") -> Any:
    mesh = make_mesh(1, jax.devices()[:1])
    return load_tower(read_tower(name), folder, mesh=mesh, rules=DEFAULT_RULES)


def test_a_tower_has_the_names_of_published_files_or_those_of_transformers(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "gemma3" / "model.safetensors")
    renamed = {name.replace("vision_tower.vision_model.", "vision_tower."): each for name, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    params = load(write_files(tmp_path, renamed), "gemma3")
    jax.tree.map(np.testing.assert_array_equal, params, load(FOLDER / "gemma3", "gemma3"))
    renamed.pop("vision_tower.post_layernorm.bias")
    with pytest.raises(WeightsError, match=r"lacks 1 of .*vision_tower\..*post_layernorm\.bias"):
        load(write_files(tmp_path, renamed), "gemma3")


def test_a_tower_is_loaded_beside_its_text_model(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "qwen3_vl" / "model.safetensors")
    text = {"lm_head.weight": np.zeros((3, 4), np.int8), "model.visualizer.weight": np.zeros(3, np.float32)}
    params, plain = load(write_files(tmp_path, tensors | text)), load(FOLDER / "qwen3_vl")
    jax.tree.map(np.testing.assert_array_equal, params, plain)


def test_faults_of_files_are_named(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "qwen3_vl" / "model.safetensors")
    name = "model.visual.blocks.1.attn.qkv.weight"
    for change, reason in (
        ({name: None}, "lacks 1 of"),
        ({name: tensors[name][:-1]}, "has shape"),
        ({name: tensors[name].astype(np.int8)}, "quantized towers are not read"),
        ({f"{name}_scale_inv": np.ones(2, np.float32)}, "has no place for"),
        ({name: np.full_like(tensors[name], np.nan)}, "NaN"),
    ):
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        with pytest.raises(WeightsError, match=reason) as caught:
            load(write_files(tmp_path, changed))
        assert name in str(caught.value)


def test_dummy_weights_have_the_shapes_of_files() -> None:
    specs = tower_param_specs(read_tower("qwen3_vl"))
    params = make_dummy_params(specs, mesh=make_mesh(1, jax.devices()[:1]), rules=DEFAULT_RULES, seed=0)
    jax.tree.map(lambda one, other: np.testing.assert_equal(one.shape, other.shape), params, load(FOLDER / "qwen3_vl"))
