"""Quantized files: every number arrives, and what is wrong with a file is named before it is served."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.core.weights import load_safetensors, read_hf_config, restore_params, save_params
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.errors import WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from pallas_kernels import QuantizedArray, dequantize
from tests.core.weights.checkpoints import flatten_arrays, one_device
from tests.golden_cases import load_case
from tests.quantized_files import METHODS, write_file, write_quantized

DOWN = "model.layers.1.mlp.down_proj"


def load(path: Path, *, widened: bool = False) -> Any:
    config = parse_config(read_hf_config(path))
    if config.quantization is not None:
        config = dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, widened=widened))
    specs = param_specs(config)
    return load_safetensors(
        path, specs, weight_sources(config), ignored_weights(config), mesh=one_device(), rules=DEFAULT_RULES
    )


def change(folder: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> Path:
    checkpoint = open_checkpoint(folder)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    edit(tensors)
    write_file(folder / "model.safetensors", tensors)
    return folder


def expand(weight: Any) -> np.ndarray:
    """The numbers of a matrix, which may have been expanded already."""
    if not isinstance(weight, dict):
        return np.asarray(weight)
    array = QuantizedArray(**weight)
    matrix = np.asarray(dequantize(array, jnp.float32))
    return matrix if array.order is None else matrix[..., np.argsort(array.order), :]


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return write_quantized(load_case("llama_gqa").path, tmp_path, METHODS["fp8 blocks"])[0]


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    return write_quantized(load_case("llama_gqa").path, tmp_path, METHODS["gptq in order"])[0]


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_matrix_is_the_one_that_was_written(method: str, widened: bool, tmp_path: Path) -> None:
    quantized, expanded = write_quantized(load_case("llama_gqa").path, tmp_path, METHODS[method])
    found, expected = load(quantized, widened=widened), load(expanded)
    for layer, expected_layer in zip(found["layers"], expected["layers"], strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            matrix = expand(layer[name]["weight"])
            np.testing.assert_allclose(matrix, expected_layer[name]["weight"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", ["fp8 tensors", "fp8 tensors, older name"])
def test_latents_matrices_are_expanded_with_scales_of_either_name(method: str, tmp_path: Path) -> None:
    quantized, expanded = write_quantized(load_case("deepseek_v3").path, tmp_path, METHODS[method])
    found, expected = load(quantized), load(expanded)
    for layer, expected_layer in zip(found["layers"], expected["layers"], strict=True):
        for name in ("k_b", "v_b"):
            matrix = np.asarray(layer[name]["weight"])
            np.testing.assert_allclose(matrix, expected_layer[name]["weight"], rtol=1e-6, atol=1e-9)


def test_joined_matrices_of_which_one_is_left_out(tmp_path: Path) -> None:
    """The scales of the others have AutoFP8's name."""
    quantized, expanded = write_quantized(load_case("llama_gqa").path, tmp_path, METHODS["fp8 tensors, older name"])
    checkpoint = open_checkpoint(expanded)
    left_out = {name: np.array(checkpoint.read(name)) for name in checkpoint.names if "k_proj" in name}

    def edit(tensors: dict[str, np.ndarray]) -> None:
        for name in left_out:
            tensors.pop(f"{name}_scale")
        tensors |= left_out

    change(quantized, edit)
    file = quantized / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["ignored_layers"] = ["k_proj"]
    file.write_text(json.dumps(config))
    for layer, expected_layer in zip(load(quantized)["layers"], load(expanded)["layers"], strict=True):
        np.testing.assert_allclose(layer["qkv"]["weight"], expected_layer["qkv"]["weight"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "dtype", "bits"),
    [
        ("fp8 blocks", "float8_e4m3fn", 8),
        ("gptq", "int4", 4),
        ("compressed int8 channels", "int8", 8),
        ("modelopt nvfp4", "float4_e2m1fn", 4),
    ],
)
def test_devices_hold_what_files_hold(method: str, dtype: str, bits: int, tmp_path: Path) -> None:
    quantized, _ = write_quantized(load_case("llama_gqa").path, tmp_path, METHODS[method])
    values = load(quantized)["layers"][0]["down"]["weight"]["values"]
    assert str(values.dtype) == dtype
    assert values.on_device_size_in_bytes() <= values.size  # XLA:CPU keeps four bits in eight
    specs = param_specs(parse_config(read_hf_config(quantized)))
    assert specs["layers"][0]["down"]["weight"]["values"].num_bytes == values.size * bits // 8


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_scales_that_are_no_scales(fp8: Path, bad: float) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}.weight_scale_inv"][1, 0] = bad

    with pytest.raises(WeightsError, match="scale that is 0, infinite") as caught:
        load(change(fp8, edit))
    assert caught.value.field == f"{DOWN}.weight_scale_inv"


@pytest.mark.parametrize(("tensor", "bad"), [("weight_scale", np.nan), ("weight_scale_2", 0.0)])
def test_scales_and_factors_of_4_bit_floats(tensor: str, bad: float, tmp_path: Path) -> None:
    """A scale of 0 is none of these: numbers of a group may be too small for an 8-bit float."""
    folder, _ = write_quantized(load_case("llama_gqa").path, tmp_path, METHODS["modelopt nvfp4"])

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}.{tensor}"][...] = bad

    with pytest.raises(WeightsError, match="scale that is 0, infinite") as caught:
        load(change(folder, edit))
    assert caught.value.field == f"{DOWN}.{tensor}"


def test_scales_that_are_missing_or_of_another_shape(fp8: Path) -> None:
    with pytest.raises(WeightsError, match=rf"lacks 1 of \d+ tensors: '{DOWN}.weight_scale_inv'"):
        load(change(fp8, lambda tensors: tensors.pop(f"{DOWN}.weight_scale_inv")))

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}.weight_scale_inv"] = np.ones((2, 2), np.float32)

    with pytest.raises(WeightsError, match=r"\(2, 2\).*\(2, 3\)"):
        load(change(fp8, edit))


def test_a_matrix_that_is_not_quantized_after_all(fp8: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].astype(np.float32)

    with pytest.raises(WeightsError, match=r"F32.*F8_E4M3"):
        load(change(fp8, edit))


def test_an_orders_groups_have_the_stated_size(gptq: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}.g_idx"][:] = 0

    with pytest.raises(WeightsError, match=r"groups.* 8 columns"):
        load(change(gptq, edit))


def test_matrices_in_one_have_one_order(gptq: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        name = "model.layers.0.self_attn.k_proj.g_idx"
        tensors[name] = np.ascontiguousarray(tensors[name][::-1])

    with pytest.raises(WeightsError, match="columns in different orders"):
        load(change(gptq, edit))


def test_biases_of_zeros_beside_matrices_without_one(gptq: Path) -> None:
    """AutoGPTQ wrote them; what is no zero is a bias that the model cannot have."""
    expected = flatten_arrays(load(gptq))
    name = f"{DOWN}.bias"
    found = flatten_arrays(load(change(gptq, lambda tensors: tensors.update({name: np.zeros(64, np.float16)}))))
    for parameter, value in expected.items():
        np.testing.assert_array_equal(found[parameter].astype(np.float32), value.astype(np.float32))

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.arange(64).astype(np.float16)

    with pytest.raises(WeightsError, match=r"not zero.*bias") as caught:
        load(change(gptq, edit))
    assert caught.value.field == name
    with pytest.raises(WeightsError, match="I32"):
        load(change(gptq, lambda tensors: tensors.update({name: np.zeros(64, np.int32)})))


def test_other_files_have_no_place_for_them(fp8: Path) -> None:
    with pytest.raises(WeightsError, match=rf"no place for: '{DOWN}.bias'"):
        load(change(fp8, lambda tensors: tensors.update({f"{DOWN}.bias": np.zeros(64, np.float16)})))


@pytest.mark.parametrize("method", ["fp8 blocks", "awq", "gptq in order", "modelopt nvfp4"])
def test_orbax_and_back(method: str, tmp_path: Path) -> None:
    quantized, _ = write_quantized(load_case("llama_gqa").path, tmp_path, METHODS[method])
    params, hf_config = load(quantized), read_hf_config(quantized)
    save_params(tmp_path / "orbax", params, hf_config)
    for widened in (False, True):
        expected = flatten_arrays(load(quantized, widened=widened))
        config = parse_config(json.loads((tmp_path / "orbax" / "config.json").read_text()))
        assert config.quantization is not None
        config = dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, widened=widened))
        restored = restore_params(tmp_path / "orbax", param_specs(config), mesh=one_device(), rules=DEFAULT_RULES)
        for name, value in flatten_arrays(restored).items():
            assert value.dtype == expected[name].dtype, name
            np.testing.assert_array_equal(value.astype(np.float32), expected[name].astype(np.float32), err_msg=name)
