"""Which grouped products the experts of a model get on a device."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.moe import MoEConfig
from jaxserve.models.base import DecoderConfig
from pallas_kernels.grouped.api import choose_grouped_impl, grouped_matmul

_log = logging.getLogger(__name__)

_TEST_EXPERTS, _TEST_ROWS = 4, 96  # of the self-test
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
    choices = [choose_grouped_impl(*pair, model.dtype, platform=platform, device_kind=device_kind) for pair in matrices]
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
    rng = np.random.default_rng(0)
    for width, columns in choice.matrices:
        x = rng.standard_normal((_TEST_ROWS, width), np.float32)
        w = rng.standard_normal((_TEST_EXPERTS + 1, width, columns), np.float32) / math.sqrt(width)
        sizes = np.array([40, 0, 17, 30], np.int32)
        arrays = jax.device_put((jnp.asarray(x, choice.dtype), jnp.asarray(w, choice.dtype), sizes), device)
        used = int(sizes.sum())
        try:
            expected, found = (
                np.asarray(jax.jit(grouped_matmul, static_argnames="impl")(*arrays, 1, impl=impl)[0, :used], np.float32)
                for impl in ("xla", choice.impl)
            )
        except Exception as error:  # whatever a compiler or a driver raises
            text = str(error).strip() or "without a word"
            return f"{type(error).__name__}: {text.splitlines()[0][:300]}"
        error = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
        if not error <= _ERROR_LIMIT:  # NaN included
            return f"matrices [{width}, {columns}] differ by {error:.3g} of the largest number"
    return None
