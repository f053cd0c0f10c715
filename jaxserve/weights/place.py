"""One parameter from host memory to its place on the devices, never sharing memory with where it came from.

Sharing is what JAX does where it can. On CPU `device_put` keeps an aligned numpy array instead of copying it, whatever
`may_alias` says (measured on jax 0.12); a mapped file or a caller's buffer kept that way changes under the engine. And
it keeps the buffers of a JAX array that already lies right: when the caller then donates that array to the next
training step, the engine's copy is deleted with it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxserve.errors import WeightsError


def cast_host(value: np.ndarray, dtype: str | np.dtype, *, name: str) -> np.ndarray:
    """Returns `value` in `dtype`: itself if it has it already, else a copy in the same memory order.

    Raises WeightsError naming the tensor `name` when float16 cannot hold a value.
    """
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    with np.errstate(over="ignore"):  # found below, for every source dtype
        cast = value.astype(target, order="K")
    # float16 alone has a smaller range than the others; elsewhere infinities would surface as NaN logits
    if target == np.float16 and not np.isfinite(cast).all():
        raise WeightsError(
            f"holds values beyond the range of float16 (stored as {value.dtype}); use dtype bfloat16 or float32",
            field=name,
        )
    return cast


def place_host(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts a host array on the devices of `sharding`, each receiving its own shard only.

    The caller gives a writable `value` away and must not change it afterwards. A read-only array, such as a view of a
    mapped file, is copied here where JAX could keep it. Transposed views are best passed as they are: the transfer
    reorders them several times faster than numpy does.
    """

    def take(index: tuple[slice, ...] | None) -> np.ndarray:
        shard = value if index is None else value[index]
        return shard.copy() if shard.flags.c_contiguous and not shard.flags.writeable else shard

    return jax.make_array_from_callback(value.shape, sharding, take)


def place_parameter(
    value: np.ndarray | jax.Array, dtype: str | np.dtype, sharding: Sharding, *, name: str
) -> jax.Array:
    """Returns a copy of `value` (any float dtype) in `dtype` and `sharding`, for `update_weights`.

    `value` stays the caller's to change, delete or donate; the result is the engine's to donate. Compiles nothing, so
    casts of JAX arrays, and the split of one that lies on a single device, go through the host. Raises WeightsError as
    `cast_host` does.
    """
    if isinstance(value, jax.Array) and value.dtype == jnp.dtype(dtype):
        splits = len(value.sharding.device_set) == 1 < len(sharding.device_set)
        if not splits:
            return jax.device_put(value, sharding, may_alias=False)
    host = np.asarray(value)
    cast = cast_host(host, dtype, name=name)
    return place_host(host.copy() if cast is host else cast, sharding)
