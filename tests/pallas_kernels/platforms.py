"""Other platforms than the one that tests run on."""

from __future__ import annotations

from typing import Any

import jax


def trace_for_platform(platform: str) -> Any:
    """A context in which programs are traced as for a device of "cpu", "gpu" or "tpu". They still run here."""
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
