"""Which grouped products a model gets, and what happens when a kernel is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import jax
import pytest

import pallas_kernels.grouped.tpu
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.runtime.experts import ExpertChoice, choose_experts, confirm_experts
from jaxserve.core.runtime.product_check import Matrix
from jaxserve.families.registry import parse_config
from pallas_kernels import QuantizedFormat
from pallas_kernels.cpu import library

PRESETS = Path(__file__).parents[3] / "configs" / "models"


def read(name: str, size: int = 1, *, by_expert: bool = False, quantization: dict[str, object] | None = None):
    hf_config = json.loads((PRESETS / f"{name}.json").read_text()) | {"quantization_config": quantization}
    return fit_devices(parse_config(hf_config), size, expert_parallel=by_expert)


def test_a_dense_model_has_none() -> None:
    model = read("qwen3-8b")
    assert choose_experts(model, 1, "gpu", "NVIDIA H200") == (model, None)


def test_a_kernel_is_chosen_for_both_products() -> None:
    model, choice = choose_experts(read("qwen3-30b-a3b"), 1, "gpu", "NVIDIA H200")
    assert choice is not None and (choice.impl, choice.is_slow) == ("gpu", False)
    assert choice.matrices == (Matrix(2048, 768), Matrix(768, 2048))
    assert {kind.mlp.impl for kind in model.layers} == {"gpu"}


def test_narrow_slices_are_slow_and_whole_experts_are_not() -> None:
    """A slice of 96 columns on each of 8 devices."""
    _, choice = choose_experts(read("qwen3-30b-a3b", 8), 8, "tpu", "TPU v5 lite")
    assert choice is not None and (choice.impl, choice.is_slow) == ("xla", True)
    assert "96 columns would be padded to 128 in memory; with enable_expert_parallel" in choice.reason
    _, choice = choose_experts(read("qwen3-30b-a3b", 8, by_expert=True), 8, "tpu", "TPU v5 lite")
    assert choice is not None and (choice.impl, choice.is_slow) == ("tpu", False)


def test_on_a_cpu_nothing_is_called_slow() -> None:
    for obstacle, impl in ((None, "cpu"), ("no compiler", "xla")):
        with mock.patch.object(library, "find_obstacle", lambda obstacle=obstacle: obstacle):
            _, choice = choose_experts(read("mixtral-8x7b"), 1, "cpu", "cpu")
        assert choice is not None and (choice.impl, choice.is_slow) == (impl, False)
        assert obstacle is None or obstacle in choice.reason


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = QuantizedFormat("float4_e2m1fn", 32, scale_dtype="bfloat16")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


@pytest.mark.parametrize(
    ("quantization", "size", "forms"),
    [
        (BLOCKS, 1, (QuantizedFormat("float8_e4m3fn", 128),) * 2),
        # A device has 192 rows of `down`: blocks of 64 repeat their scales.
        (BLOCKS, 4, (QuantizedFormat("float8_e4m3fn", 128), QuantizedFormat("float8_e4m3fn", 64))),
        (AWQ, 1, (QuantizedFormat("int4", 128, zeros=True),) * 2),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 1, (QuantizedFormat("float4_e2m1fn", 16),) * 2),
    ],
)
def test_kernels_read_quantized_experts(
    quantization: dict[str, object], size: int, forms: tuple[QuantizedFormat, ...]
) -> None:
    _, choice = choose_experts(read("qwen3-30b-a3b", size, quantization=quantization), size, "gpu", "NVIDIA H200")
    assert choice is not None and (choice.impl, choice.is_slow) == ("gpu", False)
    assert tuple(matrix.quantized for matrix in choice.matrices) == forms


@pytest.mark.parametrize(("platform", "kind"), [("gpu", "NVIDIA H200"), ("tpu", "TPU v5 lite")])
def test_kernels_read_the_experts_of_gpt_oss(platform: str, kind: str) -> None:
    model = read("gpt-oss-20b", quantization={"quant_method": "mxfp4"})
    _, choice = choose_experts(model, 1, platform, kind)
    assert choice is not None and (choice.impl, choice.is_slow) == (platform, False)
    assert set(choice.matrices) == {Matrix(2880, 2880, MXFP4)}


def test_whole_columns_are_whole_on_each_device_too() -> None:
    tensors = {"quant_method": "fp8"}
    _, choice = choose_experts(read("qwen3-30b-a3b", 4, quantization=tensors), 4, "gpu", "NVIDIA H200")
    assert choice is not None and [matrix.quantized.group for matrix in choice.matrices] == [2048, 192]


def test_what_kernels_cannot_read_is_named() -> None:
    groups = AWQ | {"group_size": 8}
    _, choice = choose_experts(read("qwen3-30b-a3b", quantization=groups), 1, "gpu", "NVIDIA H200")
    assert choice is not None and (choice.impl, choice.is_slow) == ("xla", True)
    assert "groups of a multiple of 16 weights, these are of 8" in choice.reason


CHOICE = ExpertChoice(
    "tpu_interpret",
    "a test",
    (
        Matrix(64, 128),
        Matrix(128, 640),
        Matrix(128, 128, QuantizedFormat("int4", 64, zeros=True)),
        Matrix(128, 128, MXFP4),
    ),
    "float32",
)


def test_a_kernel_that_agrees_stays() -> None:
    model = read("olmoe-1b-7b")
    assert confirm_experts(model, CHOICE, jax.devices()[0]) == (model, CHOICE)


@pytest.mark.parametrize(("fault", "said"), [("wrong", "differ by"), ("raises", "RuntimeError: no such core")])
def test_a_kernel_that_fails_gives_way(fault: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = pallas_kernels.grouped.tpu.multiply_interpreted

    def fail(*arguments: object) -> jax.Array:
        if fault == "raises":
            raise RuntimeError("no such core")
        return 1.1 * multiply(*arguments)

    monkeypatch.setattr(pallas_kernels.grouped.tpu, "multiply_interpreted", fail)
    model, choice = confirm_experts(read("olmoe-1b-7b"), CHOICE, jax.devices()[0])
    assert (choice.impl, choice.is_slow) == ("xla", True) and said in choice.reason
    assert {kind.mlp.impl for kind in model.layers} == {"xla"}
