"""Which device the code being traced will run on."""

from __future__ import annotations

import jax


def traced_platform() -> str:
    """One of "cpu", "gpu" and "tpu": the mesh in use knows (it may be an abstract one), else the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform
