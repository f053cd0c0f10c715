"""The rates of this device, measured in the same run as the results that are compared with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

_COPY_BYTES = {"cpu": 64 * 2**20, "gpu": 4 * 2**30, "tpu": 2**30}
_MATMUL_SIZE = {"cpu": 512, "gpu": 8192, "tpu": 8192}


@dataclass(frozen=True)
class DeviceLimits:
    """Measured rates of one device."""

    device: str
    bytes_per_second: float  # a copy, reads and writes counted
    flops_per_second: float  # a large bfloat16 matmul

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def measure_limits() -> DeviceLimits:
    """Returns the rates of a large copy and a large matmul on the first device, the best of several runs."""
    device = jax.devices()[0]
    platform = jax.default_backend()
    bandwidth = _copy_rate(_COPY_BYTES[platform])
    size = _MATMUL_SIZE[platform]
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)  # zeros would run faster
    flops = 2 * size**3 / min(sample_seconds(jax.jit(jnp.matmul), left, right))
    return DeviceLimits(device.device_kind, bandwidth, flops)


def _copy_rate(size: int) -> float:
    """Returns bytes per second, read and written, of a pass over an array in place, which maps no new memory."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, best = add(jnp.ones(size // 4, jnp.float32)), float("inf")
    for _ in range(5):
        x.block_until_ready()
        start = time.perf_counter()
        for _ in range(4):
            x = add(x)
        x.block_until_ready()
        best = min(best, (time.perf_counter() - start) / 4)
    return 2 * size / best


def sample_seconds(function: Callable[..., Any], *args: Any, repeats: int = 5, calls: int = 4) -> list[float]:
    """Returns the mean seconds of a call in each of `repeats` runs of `calls` calls, after a warm-up call."""
    jax.block_until_ready(function(*args))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / calls)
    return samples
