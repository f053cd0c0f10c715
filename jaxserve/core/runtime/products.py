"""The choice of how a model's quantized projections are held and multiplied on a device.

On one device few rows may get the kernel for grouped products.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import jax

from jaxserve.core.layers.moe import EXPERTS
from jaxserve.core.models.base import DecoderConfig, ParamSpec
from jaxserve.core.runtime.product_check import Matrix, find_fault
from jaxserve.families.registry import list_params
from pallas_kernels import QuantizedFormat, QuantizedProducts, choose_quantized_impl, list_row_dtypes
from pallas_kernels.cpu.packing import find_fault as find_packed_fault
from pallas_kernels.cpu.product import find_fault as find_product_fault

_log = logging.getLogger(__name__)

_VALUES = ".weight.values"


def read_format(specs: Mapping[str, ParamSpec], path: str, width: int) -> QuantizedFormat | None:
    """Returns how the matrices `path`.weight are quantized on a device that has `width` of their rows; None for 16
    bits."""
    values = specs.get(path + _VALUES)
    if values is None:
        return None
    scales = specs[f"{path}.weight.scales"]
    groups = scales.shape[-2]
    group = width if groups == 1 else values.shape[-2] // groups
    return QuantizedFormat(values.dtype, group, f"{path}.weight.zeros" in specs, scales.dtype)


def choose_products(model: DecoderConfig, num_devices: int, platform: str, device_kind: str) -> DecoderConfig:
    """Returns the model with values as a device holds them, and the products that its quantized projections get."""
    quantization = model.quantization
    if quantization is None:
        return model
    wanted = quantization.wanted_row_dtypes
    row_dtypes = tuple(dtype for dtype in list_row_dtypes(platform, device_kind) if dtype in wanted)
    quantization = replace(quantization, widened=platform == "cpu", products=QuantizedProducts(row_dtypes=row_dtypes))
    model = replace(model, quantization=quantization)
    if num_devices > 1 or not _list_matrices(model, platform, device_kind):
        return model
    return _set_impl(model, platform)


def confirm_products(model: DecoderConfig, device: jax.Device) -> DecoderConfig:
    """Returns the model as it is if its kernels agree with XLA on the device, else with XLA's products."""
    if model.few_rows and (fault := find_product_fault(model.few_rows, model.dtype)) is not None:
        _log.warning("products of few rows: XLA's, as the CPU kernel failed its self-test: %s", fault)
        model = replace(model, few_rows=0)
    if model.packed and (fault := find_packed_fault(model.dtype)) is not None:
        _log.warning("products: XLA's, as those with packed weights failed their self-test: %s", fault)
        model = replace(model, packed=False)
    impl = model.products.impl
    if impl == "xla":
        return model
    fault = find_fault(impl, _list_matrices(model, impl, device.device_kind), model.dtype, device)
    if fault is None:
        _log.info("quantized projections: a Pallas kernel for few rows, which agrees with XLA here")
        return model
    _log.warning("quantized projections: XLA's products, as the kernel failed its self-test: %s", fault)
    return _set_impl(model, "xla")


def _set_impl(model: DecoderConfig, impl: str) -> DecoderConfig:
    assert model.quantization is not None
    products = replace(model.products, impl=impl)
    return replace(model, quantization=replace(model.quantization, products=products))


def _list_matrices(model: DecoderConfig, platform: str, device_kind: str) -> list[Matrix]:
    """Returns the kinds of projections that the device's kernel multiplies."""
    specs = {name: parameter.spec for name, parameter in list_params(model).items()}
    found = {}
    for name, spec in specs.items():
        if name.endswith(_VALUES) and f".{EXPERTS}." not in name:
            width, columns = spec.shape[-2:]
            form = read_format(specs, name.removesuffix(_VALUES), width)
            assert form is not None
            found[Matrix(width, columns, form)] = None
    options = {"platform": platform, "device_kind": device_kind}
    return [
        matrix
        for matrix in found
        if choose_quantized_impl(matrix.width, matrix.columns, model.dtype, matrix.quantized, **options) != "xla"
    ]
