"""Which grouped products the experts of a model get on a device."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.moe import EXPERTS, MoEConfig
from jaxserve.models.base import DecoderConfig
from jaxserve.models.registry import list_params
from pallas_kernels import QuantizedArray, QuantizedFormat, choose_grouped_impl, grouped_matmul, quantize

_TEST_SIZES = ((40, 0, 17, 30), (1, 0, 3, 2))  # rows of each expert in the self-test: as in a prompt, and in decode
_TEST_COLUMNS = 512  # most columns there: more would only take the host longer
_ERROR_LIMIT = 0.02  # of the largest number: rounding to 16 bits gives up to 0.004


class ExpertMatrix(NamedTuple):
    """A matrix [width, columns] of an expert on a device, and how it is quantized."""

    width: int
    columns: int
    quantized: QuantizedFormat | None = None


@dataclass(frozen=True)
class ExpertChoice:
    """The implementation of grouped products, the reason for users, and the kinds of matrices that a device has."""

    impl: str
    reason: str
    matrices: tuple[ExpertMatrix, ...]
    dtype: str
    is_slow: bool = False  # the device is an accelerator without a kernel for them


def choose_experts(
    model: DecoderConfig, num_devices: int, platform: str, device_kind: str
) -> tuple[DecoderConfig, ExpertChoice | None]:
    """Returns the model with its implementation of grouped products, and why; None for a model without experts."""
    found = [kind.mlp for kind in model.layers if isinstance(kind.mlp, MoEConfig)]
    if not found:
        return model, None
    sizes = {mlp.expert.intermediate_size // (1 if mlp.by_expert else num_devices) for mlp in found}
    formats = _list_formats(model)
    matrices = []
    for size in sorted(sizes):
        for part, width, columns in (("gate_up", model.hidden_size, size), ("down", size, model.hidden_size)):
            matrices += [ExpertMatrix(width, columns, form and _fit(form, width)) for form in formats[part]]
    choose = partial(choose_grouped_impl, platform=platform, device_kind=device_kind)
    choices = [choose(width, columns, model.dtype, quantized=form) for width, columns, form in matrices]
    impl, reason = next((choice for choice in choices if choice[0] == "xla"), choices[0])
    if impl == "xla" and platform != "cpu" and num_devices > 1 and not any(mlp.by_expert for mlp in found):
        reason += "; with enable_expert_parallel each device has whole experts, whose sizes may fit"
    choice = ExpertChoice(impl, reason, tuple(matrices), model.dtype, is_slow=impl == "xla" and platform != "cpu")
    return _set_impl(model, impl), choice


def _list_formats(model: DecoderConfig) -> dict[str, list[QuantizedFormat | None]]:
    """Returns in which ways the layers' matrices `gate_up` and `down` are quantized; None among them for one that is
    not. A group of 0 rows is the whole matrix."""
    found: dict[str, dict[QuantizedFormat | None, None]] = {"gate_up": {}, "down": {}}
    if model.quantization is None:
        return {part: [None] for part in found}
    specs = {name: parameter.spec for name, parameter in list_params(model).items() if f".{EXPERTS}." in name}
    for name, spec in specs.items():
        path, _, kind = name.partition(".weight")
        form = None
        if kind == ".values":
            groups = specs[f"{path}.weight.scales"].shape[-2]
            zeros = f"{path}.weight.zeros" in specs
            form = QuantizedFormat(spec.dtype, spec.shape[-2] // groups if groups > 1 else 0, zeros)
        if kind in ("", ".values") and path.split(".")[-1] in found:
            found[path.split(".")[-1]][form] = None
    return {part: list(forms) for part, forms in found.items()}


def _fit(form: QuantizedFormat, width: int) -> QuantizedFormat:
    """Returns the format of a device's part, whose rows all share a scale if the whole matrix's do."""
    return form if form.group else replace(form, group=width)


def confirm_experts(
    model: DecoderConfig, choice: ExpertChoice, device: jax.Device
) -> tuple[DecoderConfig, ExpertChoice]:
    """Returns both as they are if the kernels agree with XLA on the device, else with XLA."""
    if choice.impl == "xla":
        return model, choice
    fault = _find_fault(choice, device)
    if fault is None:
        return model, choice
    reason = f"portable grouped products, which are slow here: the kernels failed their self-test: {fault}"
    return _set_impl(model, "xla"), replace(choice, impl="xla", reason=reason, is_slow=True)


def _set_impl(model: DecoderConfig, impl: str) -> DecoderConfig:
    layers = tuple(
        replace(kind, mlp=replace(kind.mlp, impl=impl)) if isinstance(kind.mlp, MoEConfig) else kind
        for kind in model.layers
    )
    return replace(model, layers=layers)


def _find_fault(choice: ExpertChoice, device: jax.Device) -> str | None:
    """Returns what is wrong with the kernel on the device, in words for users."""
    for matrix, sizes in itertools.product(choice.matrices, _TEST_SIZES):
        try:
            error = _measure_error(choice, matrix, sizes, device)
        except Exception as raised:  # whatever a compiler or a driver raises
            text = str(raised).strip() or "without a word"
            return f"{type(raised).__name__}: {text.splitlines()[0][:300]}"
        if not error <= _ERROR_LIMIT:  # NaN included
            return f"products with [{matrix.width}, {matrix.columns}] differ by {error:.3g} of the largest number"
    return None


def _measure_error(choice: ExpertChoice, matrix: ExpertMatrix, sizes: tuple[int, ...], device: jax.Device) -> float:
    """Returns the largest difference from XLA's products, as a share of the largest number."""
    rng = np.random.default_rng(0)
    width, columns, form = matrix
    if columns > _TEST_COLUMNS:
        columns = _TEST_COLUMNS + columns % 128  # the blocks of a kernel are as wide then
    x = rng.standard_normal((sum(sizes), width), np.float32)
    numbers = rng.standard_normal((len(sizes) + 1, width, columns), np.float32) / math.sqrt(width)
    w = jnp.asarray(numbers, choice.dtype) if form is None else _quantize(numbers, form, rng)
    arrays = jax.device_put((jnp.asarray(x, choice.dtype), w, np.int32(sizes)), device)
    expected, found = (
        np.asarray(jax.jit(partial(grouped_matmul, first=1, impl=impl))(*arrays), np.float32)
        for impl in ("xla", choice.impl)
    )
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def _quantize(numbers: np.ndarray, form: QuantizedFormat, rng: np.random.Generator) -> QuantizedArray:
    """Returns matrices of few bits, with a few zero points around the middle where the format has them."""
    w = quantize(jnp.asarray(numbers), form.dtype, (1, None), numbers.shape[1] // form.group)
    return replace(w, zeros=jnp.asarray(rng.integers(-3, 4, w.scales.shape), jnp.int8)) if form.zeros else w
