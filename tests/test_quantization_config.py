"""The options that say how weights are quantized while they are read."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.families.registry import list_schemes, param_specs, parse_config
from jaxserve.features.quantization.config import _METHODS, _OWN
from jaxserve.features.quantization.schemes import choose_schemes
from jaxserve.presets import load_preset
from jaxserve.quantization_config import METHODS, QuantizationConfig, read_quantization_config

LLAMA, QWEN = load_preset("llama-30m") or {}, load_preset("qwen3-30b-a3b") or {}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def test_methods_of_files_are_those_that_are_read() -> None:
    assert set(METHODS) == set(_METHODS) - set(_OWN)


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ("fp8", "", "must be a table"),
        ({"liner": {}}, ".liner", "linear"),
        ({"linear": {"weight": "fp7"}}, ".linear.weight", "'fp7'.*fp8_per_tensor"),
        ({"linear": {"weights": "fp8"}}, ".linear", "weight and activation"),
        ({"linear": {"activation": "fp8"}}, ".linear.activation", "'fp8'.*fp8_per_token"),
        ({"moe": {"activation": "fp8_per_token"}}, ".moe.activation", "activations keep the model's bits"),
        ({"ignore": "lm_head"}, ".ignore", "a list of modules' names"),
    ],
)
def test_tables_that_are_refused(value: Any, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.from_options(quantization_config=value)
    assert caught.value.field == f"quantization_config{field}"


def test_options_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^quantization: .*fp8_per_tensor"):
        EngineConfig.from_options(quantization="fp6")
    with pytest.raises(ConfigError, match="quantization_config"):
        EngineConfig.from_options(quantization="online")
    assert EngineConfig.from_options(quantization="awq_marlin").model.quantization == "awq"


@pytest.mark.parametrize(
    ("quantization", "table", "expected"),
    [
        ("fp8", None, {"qkv float8_e4m3fn", "o float8_e4m3fn", "experts float8_e4m3fn"}),
        ("online", {"moe": {"weight": "int4_per_group_weight_only"}}, {"experts int4"}),
        (
            "fp8_per_block",
            {"moe": "int8_per_channel_weight_only"},
            {"qkv float8_e4m3fn", "o float8_e4m3fn", "experts int8"},
        ),
        (None, {"linear": "fp8_per_channel", "ignore": ["o_proj"]}, {"qkv float8_e4m3fn"}),
        (None, {"linear": "fp8_per_channel", "ignore": ["k_proj"]}, {"o float8_e4m3fn"}),
    ],
)
def test_schemes_of_projections_and_experts(
    quantization: str | None, table: dict[str, Any] | None, expected: set[str]
) -> None:
    chosen = None if table is None else read_quantization_config(table)
    model = choose_schemes(parse_config(QWEN | {"num_hidden_layers": 1}), quantization, chosen)
    assert {f"{name.split('.')[2]} {form.dtype}" for name, (_, form) in list_schemes(model).items()} == expected


INT8, FP8 = "int8_per_channel_weight_only", "fp8_per_channel"


@pytest.mark.parametrize(
    ("weight", "activation", "expected"),
    [(INT8, "int8_per_token", {"int8"}), (FP8, "fp8_per_token", {"float8_e4m3fn"}), (INT8, None, set())],
)
def test_rows_that_are_quantized_too(weight: str, activation: str | None, expected: set[str]) -> None:
    table = read_quantization_config({"linear": {"weight": weight, "activation": activation}})
    model = choose_schemes(parse_config(LLAMA), None, table)
    assert model.quantization is not None and model.quantization.wanted_row_dtypes == expected


@pytest.mark.parametrize(
    ("weight", "activation", "words"),
    [
        (INT8, "fp8_per_token", "fp8_per_tensor and fp8_per_channel"),
        ("fp8_per_block", "fp8_per_token", "fp8_per_token.*fp8_per_block"),
        (None, "int8_per_token", "needs a scheme for the weights, too"),
    ],
)
def test_rows_that_do_not_fit_a_matrix(weight: str | None, activation: str, words: str) -> None:
    table = read_quantization_config({"linear": {"weight": weight, "activation": activation}})
    with pytest.raises(ConfigError, match=words) as caught:
        choose_schemes(parse_config(LLAMA), None, table)
    assert caught.value.field == "quantization_config.linear.activation"


def test_routers_embeddings_and_heads_stay() -> None:
    layer = param_specs(choose_schemes(parse_config(QWEN), "fp8_per_block", None))
    assert layer["embed"]["weight"].dtype == layer["lm_head"]["weight"].dtype == "bfloat16"
    assert layer["layers"][0]["router"]["weight"].dtype == "bfloat16"
    assert layer["layers"][0]["experts"]["gate_up"]["weight"]["scales"].shape == (2, 128, 16, 768)


def test_files_that_are_quantized_already() -> None:
    model = parse_config(LLAMA | {"quantization_config": AWQ})
    assert choose_schemes(model, "awq", None) is model
    with pytest.raises(ConfigError, match="awq"):
        choose_schemes(model, "fp8", None)
    with pytest.raises(ConfigError, match="awq"):
        choose_schemes(model, None, QuantizationConfig(linear="fp8_per_block"))
    with pytest.raises(ConfigError, match=r"gptq.*fp8_per_tensor"):
        choose_schemes(parse_config(LLAMA), "gptq", None)
