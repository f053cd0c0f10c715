"""The choice of kernels for a model's recurrent states on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from jaxserve.core.layers.gated_delta import GatedDeltaConfig
from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.models.base import DecoderConfig
from pallas_kernels.recurrent.api import choose_recurrent_impl, is_portable_slow
from pallas_kernels.recurrent.self_test import find_fault
from pallas_kernels.recurrent.spec import RuleShape

_Mixer = GatedDeltaConfig | Mamba2Config
_MIXERS = GatedDeltaConfig, Mamba2Config


@dataclass(frozen=True)
class RecurrenceChoice:
    """The implementation of the recurrent rules, the reason for users, and the shapes that a device has."""

    impl: str
    reason: str
    shapes: tuple[RuleShape, ...]
    num_rows: int  # of the largest step
    is_slow: bool = False  # XLA's form is slow on the device, and no kernel runs


def choose_recurrence(
    model: DecoderConfig, num_devices: int, platform: str, device_kind: str, num_tokens: int, num_rows: int
) -> tuple[DecoderConfig, RecurrenceChoice | None]:
    """Returns the model with its implementation of recurrent rules, and why; None for a model without them.

    Args:
        num_tokens: the most of a step, which has `num_rows` rows at most.
    """
    mixers = dict.fromkeys(kind.mixer for kind in model.layers if isinstance(kind.mixer, _MIXERS))
    if not mixers:
        return model, None
    shapes = tuple(_make_shape(mixer, num_devices, num_tokens) for mixer in mixers)
    choices = [choose_recurrent_impl(shape, platform=platform, device_kind=device_kind) for shape in shapes]
    impl, reason = next((choice for choice in choices if choice[0] == "xla"), choices[0])
    is_slow = impl == "xla" and any(is_portable_slow(shape.rule, platform) for shape in shapes)
    choice = RecurrenceChoice(impl, reason, shapes, num_rows, is_slow=is_slow)
    return _set_impl(model, impl), choice


def _make_shape(mixer: _Mixer, num_devices: int, num_tokens: int) -> RuleShape:
    if isinstance(mixer, GatedDeltaConfig):
        keys, group, key_dim, value_dim = mixer.sizes
        return RuleShape(keys // num_devices, group, key_dim, value_dim, mixer.state_dtype, num_tokens)
    groups, heads, value_dim, key_dim = mixer.sizes
    return RuleShape(groups // num_devices, heads, key_dim, value_dim, mixer.state_dtype, num_tokens, "space")


def confirm_recurrence(
    model: DecoderConfig, choice: RecurrenceChoice, device: jax.Device
) -> tuple[DecoderConfig, RecurrenceChoice]:
    """Returns both as they are if the kernel gives right values on the device, else with XLA."""
    if choice.impl == "xla":
        return model, choice
    faults = (find_fault(choice.impl, shape, choice.num_rows, device) for shape in choice.shapes)
    fault = next((each for each in faults if each is not None), None)
    if fault is None:
        return model, choice
    reason = f"XLA's operations, which are slow here: the {choice.impl} kernel failed its self-test: {fault}"
    return _set_impl(model, "xla"), replace(choice, impl="xla", reason=reason, is_slow=True)


def _set_impl(model: DecoderConfig, impl: str) -> DecoderConfig:
    return model.change_mixers(_MIXERS, lambda mixer: replace(mixer, impl=impl))
