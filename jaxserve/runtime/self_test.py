"""The kernels' test at the start of an engine: on the device that will serve, before anything depends on the choice."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxserve.errors import ConfigError, DeviceError
from jaxserve.runtime.startup import Shapes
from pallas_kernels.backends import choose_layout, find_backend

_log = logging.getLogger(__name__)


def confirm_attention(shapes: Shapes, device: jax.Device) -> Shapes:
    """Runs the chosen kernels once against XLA; returns the shapes to go on with.

    Portable attention in their place, where they failed, means another page layout, so this comes before the pools are
    planned. One device stands for all of a mesh: its attention is the others', on other heads. Portable attention
    itself, and so every CPU, is not tested, nor are interpreters.

    Raises:
        ConfigError: the kernels failed and were asked for by name.
        DeviceError: they left the device unable to run anything.
    """
    backend = find_backend(shapes.impl)
    if backend.platform is None or backend.interpret:
        return shapes
    # Said before: a kernel that hangs cannot be ended from here, and this is then the last line of the log.
    _log.info("attention: testing the %s kernels against XLA on %s", shapes.impl, device.device_kind)
    start = time.perf_counter()
    fault = _find_fault(shapes, device)
    if fault is None:
        _log.info("attention: they agree (%.1f s)", time.perf_counter() - start)
        return shapes
    _require_device(device, shapes.impl, fault)
    if shapes.config.compile.attention_impl != "auto":
        message = (
            f"impl {shapes.impl!r} failed its self-test on {device.device_kind}: {fault}; use 'xla', or 'auto', which "
            "then takes it"
        )
        raise ConfigError(message, field="attention_impl", value=shapes.impl)
    return replace(
        shapes,
        impl="xla",
        impl_reason=f"portable attention: the {shapes.impl} kernels failed their self-test: {fault}",
        fell_back=True,
        spec=replace(shapes.spec, layout=choose_layout("xla", shapes.spec.head_dim)),
    )


def _find_fault(shapes: Shapes, device: jax.Device) -> str | None:
    from pallas_kernels.testing.self_test import run_self_test

    bucket, state = shapes.buckets.largest, shapes.state
    for attention in dict.fromkeys(shapes.attention):
        fault = run_self_test(
            shapes.impl,
            attention,
            num_rows=bucket.rows,
            num_tokens=bucket.tokens,
            table_width=state.pages_per_row,
            softcap=shapes.model.attention.softcap,
            device=device,
        )
        if fault is not None:
            return fault
    return None


def _require_device(device: jax.Device, impl: str, fault: str) -> None:
    """After an illegal access every later call of the process fails, so that there is nothing to fall back to."""
    try:
        jax.block_until_ready(jax.device_put(jnp.zeros(()), device) + 1)
    except RuntimeError as error:
        reason = f"the {impl} kernels failed their self-test and the device answers no more: {fault}"
        raise DeviceError(
            reason, "start again with attention_impl='xla'", field="attention_impl", value=impl
        ) from error
