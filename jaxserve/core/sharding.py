"""Names of array axes, and where they lie on a device mesh.

Models name the axes of their parameters ("kv_heads", "ffn", ...); `AxisRules` is the only place that knows the mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.devices import find_devices
from jaxserve.errors import ConfigError
from pallas_kernels.layout import pads_little

_log = logging.getLogger(__name__)

TENSOR_AXIS = "tensor"
WHOLE_STACK = "whole_layers"  # the logical axis of layers in a stack that kernels read whole

Placement = Sharding | Format

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

    def placement(self, mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> Placement:
        """Returns where a parameter lies: a stack that kernels read whole by `order_rows`, others by `sharding`."""
        sharding = self.sharding(mesh, axes)
        return order_rows(sharding, shape) if axes[:1] == (WHOLE_STACK,) else sharding


def order_rows(sharding: Sharding, shape: tuple[int, ...]) -> Placement:
    """Returns the sharding with rows that are contiguous on each device, unless a TPU would pad them much.

    Kernels read stacks so. Left alone, a TPU chooses another order for sizes that it would pad, and its compiler then
    copies the stack for the kernel in every step. Its own products want that order: for them it would copy this one.
    """
    has_devices = not isinstance(getattr(sharding, "mesh", None), AbstractMesh)  # an order needs some
    if not (has_devices and pads_little(sharding.shard_shape(shape)[-1])):
        return sharding
    return Format(Layout(tuple(range(len(shape)))), sharding)


DEFAULT_RULES = AxisRules(
    rules=(
        ("vocab", TENSOR_AXIS),
        ("heads", TENSOR_AXIS),
        ("kv_heads", TENSOR_AXIS),
        ("groups", TENSOR_AXIS),
        ("channels", TENSOR_AXIS),
        ("ffn", TENSOR_AXIS),
        ("experts", TENSOR_AXIS),
        ("layers", None),
        (WHOLE_STACK, None),
    )
)

KV_POOL_AXES: Axes = (None, "kv_heads", None, None)  # [num_pages, 2K, page_size, H]: K and V of a head stay together


def send(arrays: Any, sharding: Sharding) -> Any:
    """Returns host arrays (a pytree) on the devices of a sharding. On several nodes, each must have equal ones.

    There JAX's `device_put` would compare them first, by a collective: 4.5 ms, where this takes 0.06.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)
    return jax.tree.map(lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__), arrays)


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a one-dimensional mesh over the first `tensor_parallel_size` of `devices` (default: all of JAX's).

    Neighbours on the mesh are neighbours on a TPU's interconnect, and the devices of one node stand together.

    Raises:
        ConfigError: there are too few devices; or they are on several nodes, and some would be left out.
        DeviceError: JAX finds none.
    """
    available = list(find_devices() if devices is None else devices)
    num_nodes = len({device.process_index for device in available})
    least = 1 if num_nodes == 1 else len(available)
    if not least <= tensor_parallel_size <= len(available):
        place = f"{len(available)} device(s)" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
        fits = f"use {least} to {len(available)}" if num_nodes == 1 else f"use {least}, all of them"
        raise ConfigError(
            f"{tensor_parallel_size} is not possible with {place}; {fits}",
            field="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    chosen = _order_devices(available[:tensor_parallel_size])
    return Mesh(np.array(chosen), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def _order_devices(devices: list[jax.Device]) -> list[jax.Device]:
    """Returns the devices in the order of the interconnect, node by node."""
    if len(devices) > 1 and devices[0].platform == "tpu":
        try:
            devices = list(mesh_utils.create_device_mesh((len(devices),), devices).flat)
        except (ValueError, NotImplementedError, AssertionError) as error:
            # The order is a matter of speed alone. JAX promises no kind of error: devices with a hole among them, as
            # three of four, fail an assertion; other parts of a slice may be refused in the other ways.
            _log.warning("devices keep JAX's order, in which neighbours may be far apart: %s", error)
    nodes = list(dict.fromkeys(device.process_index for device in devices))
    return sorted(devices, key=lambda device: nodes.index(device.process_index))  # stable
