"""The context of a layer in a step: all that it needs beside its parameters and its input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import flax.struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from pallas_kernels import XLA_PRODUCTS, QuantizedProducts
from pallas_kernels.spec import BatchMeta

Rotary = tuple[Float[Array, "T half"], Float[Array, "T half"]]  # cosines and sines of each token's angles


@flax.struct.dataclass
class StateSlots:
    """The slots of a step's rows in pools of recurrent state: where each reads, and where it writes (recurrent.py).

    With `leaves_pending` no row writes, and the step's streams are kept. `pending` are the places of a step's tokens
    among those that were kept.
    """

    read: Int[Array, " S"]
    write: Int[Array, " S"]
    pending: Int[Array, " T"] | None = None
    leaves_pending: bool = flax.struct.field(pytree_node=False, default=False)


@dataclass(frozen=True)
class StepContext:
    """The part that all layers share.

    `mesh` is None on a single device. `products` says how quantized projections are multiplied. Up to `few_rows` rows
    go through the CPU kernel's product. Rows from `num_rows` on are padding, of which products may make zeros; None:
    all rows count.
    """

    mesh: Mesh | None
    products: QuantizedProducts = field(default=XLA_PRODUCTS, kw_only=True)
    few_rows: int = field(default=0, kw_only=True)
    num_rows: Int[Array, ""] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class LayerContext(StepContext):
    """The step as one layer sees it.

    `rotary` is None in a layer without rotation. `batch` is that of the layer's KV group; a layer without pages gets
    another group's, which has the same rows. `pool` has the memory of the layer and perhaps of others (memory.py):
    pages, of which its own begin at `offset`; the arrays of a recurrent state by name, [L, R, ...], where `offset` is
    its place among L layers and `slots` are the rows' places; or None. `window` is that of the layer's kind, None for
    all. `layer_input` is the layer's own input, in models that have one. With `only_stores` nobody reads what the layer
    returns, only the keys and values that it stores: attention then returns zeros.
    """

    rotary: Rotary | None
    batch: BatchMeta
    pool: Any  # of pages: [num_pages, 2K, page_size, H]
    offset: int
    window: int | None
    slots: StateSlots | None = None
    layer_input: Float[Array, "T P"] | None = None
    only_stores: bool = False
