"""Places parameters on devices without sharing memory with their source.

JAX shares memory where it can. On CPU `device_put` keeps an aligned numpy array instead of copying it, whatever
`may_alias` says (measured on jax 0.12), and a mapped file or a caller's buffer could then change under the engine. It
also keeps the buffers of a JAX array that is already in place; when the caller donates that array to its next training
step, the engine's copy is deleted with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxserve.core.models.base import HostArray
from jaxserve.core.models.matrix_formats import WIDER
from jaxserve.errors import WeightsError

_CAST_PIECES = 16
_FLOATS = ("bfloat16", "float16", "float32")


def list_castable(dtype: str) -> tuple[str, ...]:
    """Returns the dtypes that a parameter of `dtype` can be made of without another meaning of its numbers."""
    narrow = tuple(name for name, wider in WIDER.items() if wider == dtype)
    return (*(_FLOATS if dtype in _FLOATS else (dtype,)), *narrow)


def cast_host(value: np.ndarray, dtype: str | np.dtype, *, name: str) -> np.ndarray:
    """Returns `value` if it has `dtype` already, else a copy in `dtype` with the same memory order.

    Raises WeightsError naming the tensor `name` when float16 cannot represent a value.
    """
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    with np.errstate(over="ignore"):  # overflow is detected below, for every source dtype
        cast = value.astype(target, order="K")
    # only float16 has a smaller range than the others
    if target == np.float16 and np.isfinite(value[~np.isfinite(cast)]).any():
        raise WeightsError(
            f"holds values beyond the range of float16 (stored as {value.dtype}); use dtype bfloat16 or float32",
            field=name,
        )
    return cast


@dataclass(frozen=True)
class CastParameter:
    """A parameter that is cast by `cast_host` where it is indexed; to fewer bits in small pieces.

    `check` is called with what was cast, and may raise. `name` is that of a tensor, for errors.
    """

    value: HostArray
    dtype: np.dtype
    name: str
    check: Callable[[np.ndarray], None] = lambda array: None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.value.shape

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        array = self._cast(index)
        self.check(array)
        return array

    def _cast(self, index: tuple[slice, ...]) -> np.ndarray:
        if self.value.dtype.itemsize <= self.dtype.itemsize or not index:
            return cast_host(self.value[index], self.dtype, name=self.name)
        out = np.empty([len(range(size)[each]) for size, each in zip(self.shape, index, strict=True)], self.dtype)
        start, stop, _ = index[-1].indices(self.shape[-1])
        step = max(1, -(-(stop - start) // _CAST_PIECES))
        for first in range(start, stop, step):
            piece = (*index[:-1], slice(first, min(stop, first + step)))
            out[..., first - start : first - start + step] = cast_host(self.value[piece], self.dtype, name=self.name)
        return out


def place_host(value: HostArray, sharding: Sharding) -> jax.Array:
    """Returns a host array placed on the devices of `sharding`; each receives only its own shard.

    The caller must not change a writable `value` afterwards. A read-only array, such as a view of a mapped file, is
    copied where JAX could keep it. Only the shards of this host's devices are read.
    """

    def take(index: tuple[slice, ...] | None) -> np.ndarray:
        shard = value[(slice(None),) * len(value.shape) if index is None else index]
        return shard.copy() if shard.flags.c_contiguous and not shard.flags.writeable else shard

    return jax.make_array_from_callback(value.shape, sharding, take)


def place_parameter(
    value: np.ndarray | jax.Array, dtype: str | np.dtype, sharding: Sharding, *, name: str
) -> jax.Array:
    """Returns a copy of `value` (any float dtype) in `dtype` and `sharding`, for `update_weights`.

    The caller may change, delete or donate `value`; the engine may donate the result. Nothing is compiled, so a JAX
    array that must be cast, or split from a single device, goes through the host. Raises WeightsError as `cast_host`
    does.
    """
    if isinstance(value, jax.Array) and value.dtype == jnp.dtype(dtype):
        if not value.is_fully_addressable and value.sharding.is_equivalent_to(sharding, value.ndim):
            return _copy_shards(value, sharding)
        splits = len(value.sharding.device_set) == 1 < len(sharding.device_set)
        if not splits:
            return jax.device_put(value, sharding, may_alias=False)
    host = np.asarray(value)
    cast = cast_host(host, dtype, name=name)
    return place_host(host.copy() if cast is host else cast, sharding)


def _copy_shards(value: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns a copy of an array that several nodes share; `device_put` would compile a program for all of them."""
    copies = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, copies)
