"""Times attention on this device: our kernels per layer, and the dense attention of other libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_shapes import POOL_BYTES, Shape, make_program

from jaxserve.tools.bench.limits import sample_seconds


@dataclass(frozen=True)
class Effort:
    """How often a measurement is run."""

    layers: int = 8  # per call
    repeats: int = 5
    calls: int = 4  # per repeat

    def sample(self, call: Callable[..., Any], *args: Any) -> list[float]:
        """Returns the seconds of one call in each repeat."""
        return sample_seconds(call, *args, repeats=self.repeats, calls=self.calls)

    def time(self, call: Callable[..., Any], *args: Any) -> float:
        """Returns the seconds of one call, the best of the repeats."""
        return min(self.sample(call, *args))


FULL, DRY = Effort(), Effort(layers=1, repeats=1, calls=1)


def summarize(samples: Sequence[float]) -> dict[str, float | int]:
    """Returns the median, minimum and 90th percentile of repeats, in seconds."""
    low, middle, high = np.percentile(samples, (0, 50, 90))
    return {"median": float(middle), "min": float(low), "p90": float(high), "repeats": len(samples)}


def count_layers(shape: Shape, layers: int, pool_bytes: int = POOL_BYTES) -> int:
    """Returns how many of `layers` fit `pool_bytes`, at least one."""
    return max(1, min(layers, pool_bytes // max(shape.bytes_read, 1)))


def hold_pool(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], jax.Array]:
    """Returns a call of a program of `make_program` that keeps the donated pool between runs."""
    held, rest = [arguments[0]], arguments[1:]

    def call() -> jax.Array:
        out, held[0], _ = run(held[0], *rest)
        return out

    return call


def time_paged(shape: Shape, impl: str, effort: Effort = FULL, config: Any = None) -> float:
    """Returns the best seconds of one layer, which include the write of its keys and values."""
    layers = count_layers(shape, effort.layers)
    return effort.time(hold_pool(*make_program(shape, impl, layers, config))) / layers


def sample_dense(shape: Shape, effort: Effort, implementation: str = "cudnn") -> list[float]:
    """Returns the seconds of dense attention through jax.nn by repeat, causal unless decode rows see all keys."""
    num_heads, num_kv_heads, head_dim = shape.heads
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (shape.rows, shape.new, num_heads, head_dim), jnp.bfloat16)
    dims = (shape.rows, shape.cached + shape.new, num_kv_heads, head_dim)
    k, v = (jax.random.normal(key, dims, jnp.bfloat16) for key in keys[1:])
    attend = partial(jax.nn.dot_product_attention, is_causal=not shape.is_decode, implementation=implementation)
    return effort.sample(jax.jit(attend), q, k, v)


def sample_torch(shape: Shape, effort: Effort) -> list[float]:
    """Returns the seconds of torch's dense attention on the GPU by repeat."""
    import torch

    num_heads, num_kv_heads, head_dim = shape.heads
    q = torch.randn(shape.rows, num_heads, shape.new, head_dim, dtype=torch.bfloat16, device="cuda")
    dims = (shape.rows, num_kv_heads, shape.cached + shape.new, head_dim)
    k, v = (torch.randn(dims, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    is_causal = not shape.is_decode

    def call() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    samples = []
    for _ in range(effort.repeats):
        start = time.perf_counter()
        for _ in range(effort.calls):
            call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / effort.calls)
    return samples
