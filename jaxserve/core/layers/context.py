"""The context of a layer in a step: all that it needs beside its parameters and its input."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from pallas_kernels import XLA_PRODUCTS, QuantizedProducts
from pallas_kernels.spec import BatchMeta

Rotary = tuple[Float[Array, "T half"], Float[Array, "T half"]]  # cosines and sines of each token's angles


@dataclass(frozen=True)
class StepContext:
    """The part that all layers share.

    `mesh` is None on a single device. `products` says how quantized projections are multiplied. Up to `few_rows` rows
    go through the CPU kernel's product.
    """

    mesh: Mesh | None
    products: QuantizedProducts = field(default=XLA_PRODUCTS, kw_only=True)
    few_rows: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class LayerContext(StepContext):
    """The step as one layer sees it.

    `rotary` is None in a layer without rotation. `kv_pages` is the pool that holds the layer's keys and values, from
    page `page_offset` on; `window` counts the tokens that a query sees, itself included, None for all. `layer_input` is
    the layer's own input, in models that have one. With `only_stores` nobody reads what the layer returns, only the
    keys and values that it stores: attention then returns zeros.
    """

    rotary: Rotary | None
    batch: BatchMeta
    kv_pages: jax.Array  # [num_pages, 2K, page_size, H]
    page_offset: int
    window: int | None
    layer_input: Float[Array, "T P"] | None = None
    only_stores: bool = False
