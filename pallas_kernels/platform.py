"""Which device the code being traced will run on."""

from __future__ import annotations

import jax


def traced_platform() -> str:
    """ "cpu", "gpu" or "tpu": that of the mesh in use, which may be an abstract one, else of the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform
