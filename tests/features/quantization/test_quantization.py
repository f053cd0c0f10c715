"""What config.json says about quantized weights, and the parameters that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.models.matrix_formats import MatrixFormat, Targets
from jaxserve.core.runtime.weight_report import describe_weights
from jaxserve.errors import ConfigError
from jaxserve.families.registry import list_params, parse_config
from jaxserve.features.quantization.config import read_quantization
from jaxserve.presets import load_preset

LLAMA = load_preset("llama-30m") or {}
FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn"
GATE, PROJECTION = "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"


def read(settings: Mapping[str, Any], module: str = PROJECTION) -> MatrixFormat | None:
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None
    return quantization.find_format(module)


def compressed(
    stored: str, ignore: tuple[str, ...] = ("lm_head",), *, inputs: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups, "ignore": list(ignore)}


# What published repositories have in their config.json, shortened where lists repeat, and the format of a projection.
PUBLISHED: dict[str, tuple[dict[str, Any], MatrixFormat]] = {
    "Qwen3-30B-A3B-FP8": (
        {
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.3.input_layernorm", GATE],
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        MatrixFormat("plain", FP8, (128, 128), "weight_scale_inv", "weight_scale"),
    ),
    "DeepSeek-V3": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        MatrixFormat("plain", FP8, (128, 128), "weight_scale_inv", "weight_scale"),
    ),
    "MiniMax-M2": (
        {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        MatrixFormat("plain", FP8, (128, 128), "weight_scale_inv", "weight_scale"),
    ),
    "Llama-3.1-8B-Instruct-FP8-dynamic": (
        compressed(
            "float-quantized",
            actorder=None,
            block_structure=None,
            dynamic=False,
            group_size=None,
            num_bits=8,
            observer="minmax",
            observer_kwargs={},
            strategy="channel",
            symmetric=True,
            type="float",
        )
        | {"kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.24},
        MatrixFormat("plain", FP8, (1, None), "weight_scale"),
    ),
    "Llama-3.1-8B-Instruct-quantized.w8a8": (
        compressed(
            "int-quantized",
            inputs={"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"},
            num_bits=8,
            strategy="channel",
            symmetric=True,
            type="int",
        ),
        MatrixFormat("plain", "int8", (1, None), "weight_scale", quantizes_rows=True),
    ),
    "Llama-3.1-8B-Instruct-quantized.w4a16": (
        compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=128),
        MatrixFormat("compressed", "int4", (1, 128), "weight_scale"),
    ),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": (
        {
            "bits": 4,
            "damp_percent": 0.01,
            "dataset": None,
            "desc_act": False,
            "group_size": 128,
            "modules_in_block_to_quantize": None,
            "quant_method": "gptq",
            "sym": True,
            "true_sequential": True,
        },
        MatrixFormat("gptq", "int4", (1, 128), "scales", zero_offset=1),
    ),
    "a GPTQ file in order": (
        {"bits": 4, "desc_act": True, "group_size": 128, "quant_method": "gptq", "sym": False},
        MatrixFormat("gptq", "int4", (1, 128), "scales", zeros=True, zero_offset=1, ordered=True),
    ),
    "Qwen2.5-7B-Instruct-AWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        MatrixFormat("awq", "int4", (1, 128), "scales", zeros=True),
    ),
    "Llama-3.1-8B-Instruct-FP8 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        MatrixFormat("plain", FP8, (None, None), "weight_scale", quantizes_rows=True),
    ),
    "Qwen3-32B-FP8-Static-PerTensor, without a method": (
        {
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                    "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                }
            },
            "ignore": ["lm_head"],
            "quant_algo": "FP8",
            "kv_cache_scheme": "FP8",
            "producer": {"name": "modelopt", "version": "0.31.0"},
        },
        MatrixFormat("plain", FP8, (None, None), "weight_scale", quantizes_rows=True),
    ),
    "Llama-3.1-8B-Instruct-NVFP4 of ModelOpt": (
        {
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head"],
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quant_method": "modelopt",
        },
        MatrixFormat("modelopt nvfp4", FP4, (1, 16), "weight_scale", factor="weight_scale_2"),
    ),
    "Llama-3.3-70B-Instruct-NVFP4": (
        compressed(
            "nvfp4-pack-quantized",
            dynamic=False,
            group_size=16,
            num_bits=4,
            strategy="tensor_group",
            symmetric=True,
            type="float",
        ),
        MatrixFormat("nvfp4", FP4, (1, 16), "weight_scale", factor="weight_global_scale", divides=True),
    ),
    "Qwen3-8B-MXFP4": (
        compressed(
            "mxfp4-pack-quantized",
            group_size=32,
            num_bits=4,
            scale_dtype="torch.uint8",
            strategy="group",
            symmetric=True,
            type="float",
        ),
        MatrixFormat("mxfp4", FP4, (1, 32), "weight_scale", scale_dtype="bfloat16"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name: str) -> None:
    settings, expected = PUBLISHED[name]
    assert read(settings) == expected
    if "lm_head" in str(settings):
        assert read(settings, "lm_head") is None


def test_rows_are_quantized_where_all_matrices_of_a_type_want_it() -> None:
    settings = PUBLISHED["Llama-3.1-8B-Instruct-quantized.w8a8"][0]
    found = read_quantization({"quantization_config": settings})
    assert found is not None and found.wanted_row_dtypes == {"int8"}
    plain = compressed("int-quantized", num_bits=8, strategy="channel")["config_groups"]["group_0"]
    groups = {"first": plain | {"targets": ["re:.*o_proj"]}} | settings["config_groups"]
    found = read_quantization({"quantization_config": settings | {"config_groups": groups}})
    assert found is not None and not found.wanted_row_dtypes


def test_modules_that_are_left_out() -> None:
    settings = PUBLISHED["Qwen3-30B-A3B-FP8"][0]
    assert read(settings, GATE) is None and read(settings, f"{GATE}_proj") is not None
    pattern = compressed("int-quantized", ("re:.*mlp.gate$",), num_bits=8)
    assert read(pattern, GATE) is None and read(pattern, f"{GATE}_proj") is not None
    wild = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.3.*"]}
    assert read(wild) is None and read(wild, PROJECTION.replace("3", "4")) is not None
    listed = {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["mlp.gate_proj"], ["mlp.up_proj"]]}
    assert read(listed) is not None and read(listed, "model.layers.3.mlp.down_proj") is None
    dynamic = {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*\.3\..*": {}}}
    assert read(dynamic) is None and read(dynamic, PROJECTION.replace("3", "4")) is not None
    mixed = {"model.layers.*.mlp": {"quant_algo": "NVFP4"}, "model.layers.3.self_attn": {"quant_algo": "FP8"}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": mixed}
    form, other = read(mixed), read(mixed, "model.layers.3.self_attn.q_proj")
    assert form is not None and other is not None and (form.dtype, other.dtype) == (FP4, FP8)
    assert read(mixed, "lm_head") is None
    rounded = {"quant_method": "auto-round", "bits": 4, "extra_config": {PROJECTION: {"bits": 16}}}
    assert read(rounded) is None


MLP = "model.layers.3.mlp"


def test_compressed_names_are_those_of_one_module() -> None:
    """Its tools compare whole names, so a container that is left out leaves its projections quantized."""
    settings = compressed("int-quantized", (MLP, "gate", f"{MLP}.down_proj"), num_bits=8)
    assert read(settings) is not None and read(settings, GATE) is not None
    assert read(settings, f"{MLP}.down_proj") is None
    assert read(settings, f"{MLP}.down_proj.0") is not None
    assert read(compressed("int-quantized", (rf"re:{MLP}\.",), num_bits=8)) is None
    assert read(compressed("int-quantized", ("Linear",), num_bits=8)) is None


@pytest.mark.parametrize(
    "order", [("class", "pattern", "name"), ("name", "pattern", "class"), ("pattern", "class", "name")]
)
def test_compressed_names_win_over_patterns_and_these_over_classes(order: tuple[str, ...]) -> None:
    targets = {"class": "Linear", "pattern": "re:.*mlp.*", "name": PROJECTION}
    strategies = {"class": {"strategy": "tensor"}, "pattern": {"strategy": "channel"}}
    strategies["name"] = {"strategy": "block", "block_structure": [16, 16]}
    weights = {kind: {"num_bits": 8, "type": "float"} | strategies[kind] for kind in order}
    groups = {kind: {"targets": [targets[kind]], "weights": weights[kind]} for kind in order}
    settings = compressed("float-quantized") | {"config_groups": groups}
    forms = [read(settings, module) for module in (PROJECTION, f"{MLP}.up_proj", "model.layers.3.self_attn.o_proj")]
    assert [form and form.block for form in forms] == [(16, 16), (1, None), (None, None)]
    assert read(settings, "lm_head") is None


def test_compressed_groups_without_weights() -> None:
    """They quantize activations alone; a list of no groups is one of files whose keys and values have scales."""
    plain = compressed("int-quantized", num_bits=8, strategy="channel")
    without = {"targets": [r"re:.*gate_proj$"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}
    settings = plain | {"config_groups": {**plain["config_groups"], "group_1": without}}
    assert read(settings) is None and read(settings, f"{MLP}.up_proj") is not None
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    only_cache = plain | {"format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
    assert read(only_cache) is None
    model = parse_config(LLAMA | {"quantization_config": only_cache})
    assert list_params(model).keys() == list_params(parse_config(LLAMA)).keys()
    assert describe_weights(model) is None


@pytest.mark.parametrize(
    ("actorder", "ordered"),
    [("group", True), ("dynamic", True), (True, True), ("weight", False), ("static", False), (None, False)],
)
def test_compressed_orders_of_columns(actorder: object, ordered: bool) -> None:
    form = read(compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder=actorder))
    assert form is not None and form.ordered is ordered


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"quant_method": "gptq", "bits": 2}, "bits", "2 is not read; 4 and 8"),
        ({"quant_method": "gptq", "bits": True}, "bits", "True is not read"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size", "0 is not read; -1 and positive"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format", "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 8}}}, "dynamic", "leave modules out"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "dynamic", "regular expressions"),
        ({"quant_method": "awq", "bits": 8}, "bits", "8 is not read; 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size", "two positive numbers"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert", "a list of names"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "x"}, "packing_format", "'x' is not read"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 8}}}, "extra_config", "16 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo", "'W4A8_AWQ' is not read; FP8, NVFP4"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
            "quantized_layers.a",
            "FP8 and NVFP4",
        ),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "group_size", "None is not read; 16"),
        (compressed("float-quantized", num_bits=4, type="float"), "format", "read; nvfp4-pack-quantized and mxfp4"),
        (compressed("marlin-24", num_bits=4), "format", "'marlin-24' is not read; pack-quantized"),
        (compressed("pack-quantized", num_bits=3), "config_groups.group_0.weights", "int of 3 bits"),
        (
            compressed("float-quantized", num_bits=8, type="float", symmetric=False),
            "config_groups.group_0.weights.symmetric",
            "no zero points",
        ),
        (
            compressed("int-quantized", num_bits=8, strategy="token"),
            "config_groups.group_0.weights.strategy",
            "'token' is not read",
        ),
        (
            compressed("int-quantized", num_bits=8) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config",
            "none would be",
        ),
        (compressed("int-quantized", num_bits=8) | {"config_groups": {}}, "config_groups", "at least one group"),
        (
            compressed("pack-quantized", num_bits=4, group_size=32, actorder="random"),
            "config_groups.group_0.weights.actorder",
            "group, dynamic, weight and static would be",
        ),
    ],
)
def test_what_is_not_read_is_named(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_quantization({"quantization_config": settings})
    assert caught.value.field == f"quantization_config.{field}"


def test_parts_of_a_matrix() -> None:
    table = list_params(parse_config(LLAMA | {"quantization_config": PUBLISHED["a GPTQ file in order"][0]}))
    parts = {name.removeprefix("layers.0."): parameter.spec for name, parameter in table.items()}
    assert parts["down.weight.values"].shape == (1536, 512) and parts["down.weight.values"].dtype == "int4"
    assert parts["down.weight.scales"].shape == (12, 512) == parts["down.weight.zeros"].shape
    assert parts["down.weight.order"].shape == (1536,) and "down.weight" not in parts
    assert parts["gate_up.weight.scales"].shape == (2, 4, 1536)
    assert parts["attn_norm.weight"].dtype == parts["embed.weight"].dtype == "float32"
    assert parts["gate_up.weight.values"].num_bytes == 512 * 1536


@pytest.mark.parametrize(("devices", "groups"), [(1, 12), (2, 12), (4, 12), (8, 24)])
def test_groups_are_not_cut_between_devices(devices: int, groups: int) -> None:
    """1,536 columns in groups of 128 are 12; eight devices have 192 each, so groups are of 64."""
    config = LLAMA | {"quantization_config": PUBLISHED["DeepSeek-V3"][0]}
    table = list_params(fit_devices(parse_config(config | {"num_key_value_heads": 8}), devices))
    assert table["layers.0.down.weight.scales"].spec.shape == (groups, 512)


def test_experts_of_gpt_oss() -> None:
    config = dict(load_preset("gpt-oss-20b") or {})
    table = list_params(parse_config(config))
    values, scales = (table[f"layers.1.experts.gate_up.weight.{part}"] for part in ("values", "scales"))
    assert (values.spec.shape, values.spec.dtype) == ((2, 32, 2880, 2880), FP4)
    assert (scales.spec.shape, scales.spec.dtype) == ((2, 32, 90, 2880), "bfloat16")
    assert values.source.names == ("model.layers.1.mlp.experts.gate_up_proj_blocks",)
    assert values.source.shapes == ((32, 5760, 90, 16),) and scales.source.shapes == ((32, 5760, 90),)
    assert table["layers.1.qkv.weight"].spec.dtype == "bfloat16"


def test_experts_in_an_order_are_refused() -> None:
    config = dict(load_preset("qwen3-30b-a3b") or {})
    config = parse_config(config | {"quantization_config": PUBLISHED["a GPTQ file in order"][0]})
    with pytest.raises(ConfigError, match="experts whose columns have an order"):
        list_params(config)


def test_matrices_that_are_expanded() -> None:
    """Routers are, and what latents are made of; both are read plainly from files that have no scales for them."""
    config = dict(load_preset("deepseek-v3") or {}) | {"num_hidden_layers": 4}
    table = list_params(parse_config(config | {"quantization_config": PUBLISHED["DeepSeek-V3"][0]}))
    router = table["layers.3.router.weight"]
    assert router.spec.dtype == "bfloat16" and router.source.otherwise is not None
    plain = router.source.choose({"model.layers.3.mlp.gate.weight"})
    assert plain.names == ("model.layers.3.mlp.gate.weight",) and plain.dtypes is None
    keys = table["layers.3.k_b.weight"].source
    assert keys.part and keys.names[1].endswith("kv_b_proj.weight_scale_inv")
    assert table["layers.3.experts.down.weight.values"].spec.shape == (256, 2048, 7168)


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_expanded_matrices_have_scales_of_either_name(scale: str) -> None:
    """AutoFP8 wrote `weight_scale`."""
    config = dict(load_preset("deepseek-v3") or {}) | {"num_hidden_layers": 4}
    table = list_params(parse_config(config | {"quantization_config": {"quant_method": "fp8"}}))
    names = {f"model.layers.3.self_attn.kv_b_proj.{part}" for part in ("weight", scale)}
    for part in ("k_b", "v_b"):
        assert set(table[f"layers.3.{part}.weight"].source.choose(names).names) == names
    left_out = {"quant_method": "fp8", "ignored_layers": ["k_proj"]}
    source = list_params(parse_config(LLAMA | {"quantization_config": left_out}))["layers.0.qkv.weight"].source
    module = "model.layers.0.self_attn"
    names = {f"{module}.{part}" for part in ("q_proj.weight", "k_proj.weight", "v_proj.weight")}
    names |= {f"{module}.{part}_proj.{scale}" for part in "qv"}
    assert set(source.choose(names).names) == names


def test_parts_that_differ_are_expanded() -> None:
    settings = compressed("int-quantized", ("re:.*k_proj",), num_bits=8, strategy="channel")
    table = list_params(parse_config(LLAMA | {"quantization_config": settings}))
    source = table["layers.0.qkv.weight"].source
    assert [name.rsplit(".", 2)[1:] for name in source.names] == [
        ["q_proj", "weight"],
        ["q_proj", "weight_scale"],
        ["k_proj", "weight"],
        ["v_proj", "weight"],
        ["v_proj", "weight_scale"],
    ]
    assert "layers.0.o.weight.values" in table


def test_names_match_whole_parts_of_a_name() -> None:
    targets = Targets(frozenset(["mlp.gate", "lm_head"]))
    assert [
        targets.match(name) for name in ("a.mlp.gate", "a.mlp.gate.b", "a.mlp.gate_proj", "lm_head", "a.lm_head.b")
    ] == [
        True,
        True,
        False,
        True,
        True,
    ]
