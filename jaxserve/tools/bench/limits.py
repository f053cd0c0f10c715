"""The limits of this device: its rates, measured in the same run as what is compared with them, and the least time that
a step of a model takes at these rates.

A step streams the weights W while F operations run on them, then reads the pages KV, so that it takes at least
max(W / BW, F / P) + KV / BW. Of experts, W counts those that the step's tokens go to. BW is the rate of a copy and P
that of a matrix product in the model's type. Several devices share all three equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.engine.llm import LLM

_COPY_BYTES = {"cpu": 64 * 2**20, "gpu": 4 * 2**30, "tpu": 2**30}
_MATMUL_SIZE = {"cpu": 512, "gpu": 8192, "tpu": 8192}


@dataclass(frozen=True)
class DeviceLimits:
    """Measured rates of one device."""

    device: str
    bytes_per_second: float  # a copy, reads and writes counted
    flops_per_second: float  # a large matrix product
    dtype: str = "bfloat16"  # of the product

    def asdict(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return asdict(self)

    def describe(self) -> str:
        """Returns one line for people."""
        return (
            f"{self.device}: {self.bytes_per_second / 1e9:,.3g} GB/s copied, "
            f"{self.flops_per_second / 1e9:,.3g} GFLOP/s in {self.dtype} products"
        )


def measure_limits(dtype: str = "bfloat16") -> DeviceLimits:
    """Returns the rates of a large copy and a large matrix product on the first device, the best of several runs."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    platform = jax.default_backend()
    bandwidth = _copy_rate(_COPY_BYTES[platform])
    size = _MATMUL_SIZE[platform]
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), dtype) for key in keys)  # zeros would run faster
    flops = 2 * size**3 / min(sample_seconds(jax.jit(jnp.matmul), left, right))
    return DeviceLimits(device.device_kind, bandwidth, flops, dtype)


def _copy_rate(size: int) -> float:
    """Returns bytes per second, read and written, of a pass over an array in place, which maps no new memory."""
    import jax
    import jax.numpy as jnp

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
    import jax

    jax.block_until_ready(function(*args))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / calls)
    return samples


@dataclass(frozen=True)
class ModelCosts:
    """What the steps of a loaded model cost, all devices together."""

    model: DecoderConfig
    num_devices: int
    weight_bytes: int  # without an embedding table that is only looked up
    num_weights: tuple[int, int]  # that each token meets in the layers, and in the head
    keys: tuple[tuple[float, int | None], ...]  # of each KV group: bytes of a token in its layers, and its window
    pair_operations: int  # of one query and one key, in all layers and heads

    @classmethod
    def of(cls, llm: LLM) -> ModelCosts:
        """Returns the costs of the model that is loaded."""
        import jax

        from jaxserve.tools.simulation.calibration import count_weights
        from pallas_kernels.layout import page_bytes

        ready = llm.ready
        model, params = ready.shapes.model, ready.runner.params
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        groups = list(zip(model.kv_groups, ready.plan.specs, strict=True))
        return cls(
            model,
            ready.shapes.num_devices,
            total - (0 if model.embedding.tied else params["embed"]["weight"].nbytes),
            count_weights(model),
            tuple((len(group.layers) * page_bytes(spec) / spec.page_size, group.window) for group, spec in groups),
            sum(
                2 * len(group.layers) * group.memory.num_heads * (spec.head_dim + spec.out_dim)
                for group, spec in groups
            ),
        )

    def streamed_bytes(self, num_tokens: int) -> float:
        """Returns the bytes of weights that a step reads: all but experts that none of its tokens goes to."""
        from jaxserve.tools.simulation.calibration import idle_bytes

        return self.weight_bytes - idle_bytes(self.model, num_tokens)

    def key_bytes(self, context: int) -> float:
        """Returns the bytes of what a query at the end of `context` tokens sees, in all layers together."""
        return sum(size * min(context, window or context) for size, window in self.keys)

    def operations(self, num_tokens: int, num_sampled: int) -> float:
        """Returns the operations of the products with weights in a step."""
        layers, head = self.num_weights
        return 2.0 * (layers * num_tokens + head * num_sampled)

    def step_seconds(self, limits: DeviceLimits, num_tokens: int, num_sampled: int, key_bytes: float) -> float:
        """Returns the least seconds of a step, by the module's formula."""
        streaming = self.streamed_bytes(num_tokens) / limits.bytes_per_second
        computing = self.operations(num_tokens, num_sampled) / limits.flops_per_second
        return (max(streaming, computing) + key_bytes / limits.bytes_per_second) / self.num_devices
