"""Which products quantized projections get, and what happens when a kernel is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import pallas_kernels.grouped.tpu
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.runtime import products
from jaxserve.core.runtime.product_check import Matrix
from jaxserve.core.runtime.products import choose_products, confirm_products
from jaxserve.families.registry import parse_config
from pallas_kernels import QuantizedFormat, QuantizedProducts

PRESET = Path(__file__).parents[3] / "configs" / "models" / "qwen3-8b.json"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSORS = {"quant_method": "fp8"}


def read(quantization: dict[str, object] | None, size: int = 1):
    hf_config = json.loads(PRESET.read_text()) | {"quantization_config": quantization}
    return fit_devices(parse_config(hf_config), size)


@pytest.mark.parametrize(
    ("quantization", "size", "device", "impl"),
    [
        (BLOCKS, 1, ("gpu", "NVIDIA H200"), "gpu"),
        (BLOCKS, 2, ("gpu", "NVIDIA H200"), "xla"),  # the compiler cannot split a kernel
        (BLOCKS, 1, ("gpu", "NVIDIA A100-SXM4-40GB"), "xla"),
        (BLOCKS, 1, ("tpu", "TPU v5 lite"), "xla"),
        (BLOCKS, 1, ("cpu", "cpu"), "xla"),
        (TENSORS, 1, ("gpu", "NVIDIA H200"), "xla"),  # XLA scales after its own product
    ],
)
def test_the_kernel_is_for_groups_on_one_hopper(
    quantization: dict[str, object], size: int, device: tuple[str, str], impl: str
) -> None:
    model = choose_products(read(quantization, size), size, *device)
    assert model.products.impl == impl


def test_a_model_of_16_bits_stays_as_it_is() -> None:
    assert choose_products(read(None), 1, "gpu", "NVIDIA H200").quantization is None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_kernel_that_fails_gives_way(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read(BLOCKS)
    model = replace(model, quantization=replace(model.quantization, products=QuantizedProducts("tpu_interpret")))
    matrix = Matrix(128, 128, QuantizedFormat("int8", 64))
    monkeypatch.setattr(products, "_list_matrices", lambda *arguments: [matrix])
    if is_wrong:
        multiply = pallas_kernels.grouped.tpu.multiply_interpreted
        monkeypatch.setattr(pallas_kernels.grouped.tpu, "multiply_interpreted", lambda *args: 1.1 * multiply(*args))
    found = confirm_products(model, jax.devices()[0])
    assert found.products.impl == ("xla" if is_wrong else "tpu_interpret")
