"""Finds NaN and infinity among weights."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.weights.reader import Checkpoint
from jaxserve.errors import WeightsError

# The bits of the least number that is none, without its sign. Of the other types that weights have, none has any.
_LEAST_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3fn": 0x7F}


def has_nonfinite(array: np.ndarray) -> bool:
    """Whether any number of an array of any dtype is NaN or infinite.

    As integers, the bits of these are the largest of their sign. To find a maximum takes no memory, and no more time
    than to read the array.
    """
    least, size = _LEAST_BITS.get(array.dtype.name), array.dtype.itemsize
    if least is None or not array.size:
        return False
    sign = 1 << (8 * size - 1)
    return bool(array.view(f"i{size}").max() >= least or array.view(f"u{size}").max() >= least | sign)


def has_nonfinite_shard(array: jax.Array) -> bool:
    """The same of a JAX array's shards on this host's devices, one at a time on the host: nothing is compiled."""
    shards = (shard.data for shard in array.addressable_shards if shard.replica_id == 0)
    # `np.asarray` would keep the host's copy as long as its array, here one that is made for it
    views = (jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]) for data in shards)
    return any(has_nonfinite(np.asarray(view)) for view in views)


def is_finite_everywhere(array: jax.Array) -> bool:
    """Whether all numbers of a JAX array are finite; the devices that have it look. Compiles a program."""
    return array.dtype.name not in _LEAST_BITS or bool(jnp.isfinite(array).all())


def require_finite(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raises WeightsError, naming tensor and file, for the first of these tensors that has NaN or infinity."""
    for name in names:
        if has_nonfinite(np.asarray(checkpoint.read(name))):
            raise nonfinite_error(name, checkpoint.file(name))


def nonfinite_error(name: str, file: str | None = None) -> WeightsError:
    """Returns the error for a tensor in a file, or of the caller's."""
    where, cure = (" in ", "download the file again, or ") if file else ("", "")
    message = f"holds NaN or infinite values{where}{file or ''}; {cure}set allow_nonfinite to use it as it is"
    return WeightsError(message, field=name)
