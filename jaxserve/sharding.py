"""Names of array axes, and where they lie on a device mesh.

Models name the axes of their parameters ("kv_heads", "ffn", ...); `AxisRules` is the only place that knows the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.devices import find_devices
from jaxserve.errors import ConfigError

TENSOR_AXIS = "tensor"

Axes = tuple[str | None, ...]  # for each array axis a logical name, or None if it is never split


@dataclass(frozen=True)
class AxisRules:
    """Logical axis -> mesh axis; an axis mapped to None is replicated."""

    rules: tuple[tuple[str, str | None], ...]

    def spec(self, axes: Axes) -> PartitionSpec:
        """Returns the partition of an array with these logical axes.

        Raises ValueError for an unknown logical axis, and when two axes of one array fall on the same mesh axis.
        """
        table = dict(self.rules)
        unknown = [axis for axis in axes if axis is not None and axis not in table]
        if unknown:
            raise ValueError(f"axes: unknown logical axis {unknown[0]!r}; known are {sorted(table)}")
        mesh_axes = [None if axis is None else table[axis] for axis in axes]
        used = [axis for axis in mesh_axes if axis is not None]
        if len(set(used)) != len(used):
            raise ValueError(f"axes: {axes} would put two axes of one array on the same mesh axis: {mesh_axes}")
        return PartitionSpec(*mesh_axes)

    def sharding(self, mesh: Mesh, axes: Axes) -> NamedSharding:
        """Returns `spec(axes)` on `mesh`."""
        return NamedSharding(mesh, self.spec(axes))


DEFAULT_RULES = AxisRules(
    rules=(
        ("vocab", TENSOR_AXIS),
        ("heads", TENSOR_AXIS),
        ("kv_heads", TENSOR_AXIS),
        ("ffn", TENSOR_AXIS),
        ("layers", None),
    )
)

KV_POOL_AXES: Axes = (None, "kv_heads", None, None)  # [num_pages, 2K, page_size, H]: K and V of a head stay together


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a one-dimensional mesh over the first `tensor_parallel_size` of `devices` (default: all of JAX's).

    Raises:
        ConfigError: there are too few devices.
        DeviceError: JAX finds none.
    """
    available = list(find_devices() if devices is None else devices)
    if not 1 <= tensor_parallel_size <= len(available):
        raise ConfigError(
            f"{tensor_parallel_size} is not possible with {len(available)} device(s); use 1 to {len(available)}",
            field="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    chosen = np.array(available[:tensor_parallel_size])
    return Mesh(chosen, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))
