"""Blocks: named tuples of arrays packed into one int32 array, so that the host sends them in one transfer.

The specs of a block are the same tuple of abstract values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32


def measure_block(specs: NamedTuple) -> int:
    """Returns E, the length of a packed block."""
    return sum(spec.size for spec in specs)


def pack_block(block: NamedTuple) -> Int32[np.ndarray, " E"]:
    """Returns the numbers of a block, one field behind the other."""
    return np.concatenate([field.reshape(-1).view(np.int32) for field in block])


def unpack_block[Block: NamedTuple](line: Int[Array, " E"], specs: Block) -> Block:
    """Returns the block of these specs that `pack_block` packed."""
    fields: Any = jnp.split(line, np.cumsum([spec.size for spec in specs])[:-1])
    pairs = zip(fields, specs, strict=True)
    return specs._make(lax.bitcast_convert_type(field.reshape(spec.shape), spec.dtype) for field, spec in pairs)
