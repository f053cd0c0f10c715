"""Which grouped products the experts of a model get on a device."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.moe import MoEConfig
from jaxserve.models.base import DecoderConfig
from pallas_kernels import choose_grouped_impl, grouped_matmul

_TEST_SIZES = ((40, 0, 17, 30), (1, 0, 3, 2))  # rows of each expert in the self-test: as in a prompt, and in decode
_TEST_COLUMNS = 512  # most columns there: more would only take the host longer
_ERROR_LIMIT = 0.02  # of the largest number: rounding to 16 bits gives up to 0.004


@dataclass(frozen=True)
class ExpertChoice:
    """The implementation of grouped products, the reason for users, and the matrices [K, N] that a device has."""

    impl: str
    reason: str
    matrices: tuple[tuple[int, int], ...]
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
    matrices = tuple(pair for size in sorted(sizes) for pair in ((model.hidden_size, size), (size, model.hidden_size)))
    choose = partial(
        choose_grouped_impl, platform=platform, device_kind=device_kind, quantized=model.quantization is not None
    )
    choices = [choose(*pair, model.dtype) for pair in matrices]
    impl, reason = next((choice for choice in choices if choice[0] == "xla"), choices[0])
    if impl == "xla" and platform != "cpu" and num_devices > 1 and not any(mlp.by_expert for mlp in found):
        reason += "; with enable_expert_parallel each device has whole experts, whose sizes may fit"
    choice = ExpertChoice(impl, reason, matrices, model.dtype, is_slow=impl == "xla" and platform != "cpu")
    return _set_impl(model, impl), choice


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
    for (width, columns), sizes in itertools.product(choice.matrices, _TEST_SIZES):
        try:
            error = _measure_error(choice, width, columns, sizes, device)
        except Exception as raised:  # whatever a compiler or a driver raises
            text = str(raised).strip() or "without a word"
            return f"{type(raised).__name__}: {text.splitlines()[0][:300]}"
        if not error <= _ERROR_LIMIT:  # NaN included
            return f"products with [{width}, {columns}] differ by {error:.3g} of the largest number"
    return None


def _measure_error(choice: ExpertChoice, width: int, columns: int, sizes: tuple[int, ...], device: jax.Device) -> float:
    """Returns the largest difference from XLA's products, as a share of the largest number."""
    rng = np.random.default_rng(0)
    if columns > _TEST_COLUMNS:
        columns = _TEST_COLUMNS + columns % 128  # the blocks of a kernel are as wide then
    x = rng.standard_normal((sum(sizes), width), np.float32)
    w = rng.standard_normal((len(sizes) + 1, width, columns), np.float32) / math.sqrt(width)
    arrays = jax.device_put((jnp.asarray(x, choice.dtype), jnp.asarray(w, choice.dtype), np.int32(sizes)), device)
    expected, found = (
        np.asarray(jax.jit(partial(grouped_matmul, first=1, impl=impl))(*arrays), np.float32)
        for impl in ("xla", choice.impl)
    )
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
