"""The device that the code being traced will run on."""

from __future__ import annotations

import jax

_GPUS = ("cuda", "rocm")  # JAX's names for GPUs of one vendor


def name_platform(platform: str) -> str:
    """The platform by which defaults and kernels are chosen: "gpu" for GPUs of every vendor."""
    return "gpu" if platform in _GPUS else platform


def traced_platform() -> str:
    """One of "cpu", "gpu" and "tpu": that of the mesh in use, which may be abstract, else of the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return name_platform(jax.default_backend() if device is None else device.platform)


def traced_device_kind() -> str:
    """The name of the device, e.g. "NVIDIA H200", "TPU v5 lite" or "cpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.local_devices()[0].device_kind if device is None else device.device_kind


def traced_core_count() -> int:
    """Multiprocessors of the GPU, or cores of the TPU, being traced for; 1 on a CPU, where kernels are interpreted."""
    if traced_platform() == "cpu":
        return 1
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.num_cores or 1
    found = jax.local_devices()[0]
    return int(getattr(found, "core_count", None) or getattr(found, "num_cores", None) or 1)
