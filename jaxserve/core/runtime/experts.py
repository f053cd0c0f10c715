"""The choice of grouped products for a model's experts on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from jaxserve.core.layers.moe import EXPERTS, MoEConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.product_check import Matrix, find_fault
from jaxserve.core.runtime.products import read_format
from jaxserve.families.registry import list_params
from pallas_kernels import choose_grouped_impl


@dataclass(frozen=True)
class ExpertChoice:
    """The implementation of grouped products, the reason for users, and the kinds of matrices that a device has."""

    impl: str
    reason: str
    matrices: tuple[Matrix, ...]
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
    matrices = _list_matrices(model, sorted(sizes))
    choose = partial(choose_grouped_impl, platform=platform, device_kind=device_kind)
    choices = [choose(width, columns, model.dtype, quantized=form) for width, columns, form in matrices]
    impl, reason = next((choice for choice in choices if choice[0] == "xla"), choices[0])
    if impl == "xla" and platform != "cpu" and num_devices > 1 and not any(mlp.by_expert for mlp in found):
        reason += "; with enable_expert_parallel each device has whole experts, whose sizes may fit"
    choice = ExpertChoice(impl, reason, tuple(matrices), model.dtype, is_slow=impl == "xla" and platform != "cpu")
    return _set_impl(model, impl), choice


def _list_matrices(model: DecoderConfig, sizes: Sequence[int]) -> list[Matrix]:
    """Returns the kinds of matrices of experts of these sizes."""
    quantized = model.quantization is not None
    specs = {name: parameter.spec for name, parameter in list_params(model).items()} if quantized else {}
    paths = {name.partition(".weight")[0] for name in specs if f".{EXPERTS}." in name and ".weight" in name}
    matrices = []
    for size in sizes:
        for parts, width, columns in (
            (("gate_up", "up"), model.hidden_size, size),
            (("down",), size, model.hidden_size),
        ):
            of_part = (path for path in sorted(paths) if path.rpartition(".")[2] in parts)
            forms = dict.fromkeys(read_format(specs, path, width) for path in of_part) or {None: None}
            matrices += [Matrix(width, columns, form) for form in forms]
    return matrices


def confirm_experts(
    model: DecoderConfig, choice: ExpertChoice, device: jax.Device
) -> tuple[DecoderConfig, ExpertChoice]:
    """Returns both as they are if the kernels agree with XLA on the device, else with XLA."""
    if choice.impl == "xla":
        return model, choice
    fault = find_fault(choice.impl, choice.matrices, choice.dtype, device)
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
