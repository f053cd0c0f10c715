"""Tests the chosen kernels on the device, at the start of an engine: attention, experts, recurrent states, quantized
projections."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxserve.core.runtime.experts import confirm_experts
from jaxserve.core.runtime.products import confirm_products
from jaxserve.core.runtime.recurrence import confirm_recurrence
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.errors import ConfigError, DeviceError
from pallas_kernels.backends import find_backend

_log = logging.getLogger(__name__)


def confirm_kernels(shapes: Shapes, device: jax.Device) -> Shapes:
    """Returns the shapes with implementations that work on the device: `confirm_attention`, recurrent states, and
    the products of experts and of quantized projections.

    Raises: as `confirm_attention`.
    """
    shapes = confirm_attention(shapes, device)
    shapes = replace(shapes, model=confirm_products(shapes.model, device))
    if shapes.experts is not None:
        model, experts = confirm_experts(shapes.model, shapes.experts, device)
        shapes = replace(shapes, model=model, experts=experts)
    if shapes.recurrence is not None:
        model, recurrence = confirm_recurrence(shapes.model, shapes.recurrence, device)
        shapes = replace(shapes, model=model, recurrence=recurrence)
    return shapes


def confirm_attention(shapes: Shapes, device: jax.Device) -> Shapes:
    """Runs the chosen kernels once; returns `shapes`, with portable attention if they gave wrong values or failed.

    Portable attention has another page layout, so call this before the pools are planned. One device of a mesh is
    tested: the others do the same on other heads. Portable attention and interpreters are not tested.

    Raises:
        ConfigError: the kernels failed and were asked for by name.
        DeviceError: the kernels left the device unable to run anything.
    """
    backend = find_backend(shapes.impl)
    if backend.platform is None or backend.interpret:
        return shapes
    # Logged first: a kernel that hangs cannot be ended from here, and this is then the last line.
    _log.info("attention: testing the %s kernels on %s", shapes.impl, device.device_kind)
    start = time.perf_counter()
    fault = _find_fault(shapes, device)
    if fault is None:
        _log.info("attention: they passed (%.1f s)", time.perf_counter() - start)
        return shapes
    _require_device(device, shapes.impl, fault)
    if shapes.config.compile.attention_impl != "auto":
        message = (
            f"impl {shapes.impl!r} failed its self-test on {device.device_kind}: {fault}; use 'xla', or 'auto', which "
            "then takes it"
        )
        raise ConfigError(message, field="attention_impl", value=shapes.impl)
    reason = f"portable attention: the {shapes.impl} kernels failed their self-test: {fault}"
    return replace(shapes.with_impl("xla", reason), fell_back=True)


def _find_fault(shapes: Shapes, device: jax.Device) -> str | None:
    from pallas_kernels.testing.self_test import run_self_test

    bucket, state = shapes.buckets.largest, shapes.state
    layers = [shapes.model.layers[group.layers[0]].attention for group in shapes.model.kv_groups]
    for shape, config in dict.fromkeys(zip(shapes.attention, layers, strict=True)):
        fault = run_self_test(
            shapes.impl,
            shape,
            num_rows=bucket.rows,
            num_tokens=bucket.tokens,
            table_width=state.pages_per_row,
            softcap=config.softcap,
            sinks=config.sinks,
            device=device,
        )
        if fault is not None:
            return fault
    return None


def _require_device(device: jax.Device, impl: str, fault: str) -> None:
    """Raises DeviceError if the device fails every call, as after an illegal access: no fallback would run."""
    try:
        jax.block_until_ready(jax.device_put(jnp.zeros(()), device) + 1)
    except RuntimeError as error:
        reason = f"the {impl} kernels failed their self-test and the device answers no more: {fault}"
        raise DeviceError(
            reason, "start again with attention_impl='xla'", field="attention_impl", value=impl
        ) from error
