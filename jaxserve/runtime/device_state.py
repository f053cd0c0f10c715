"""State that stays on the device between steps and is always donated: the KV pools and the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.runtime.inputs import StateShape

if TYPE_CHECKING:
    from jax.sharding import Sharding

KVCache = tuple[jax.Array, ...]  # pools [pages of their layers, 2K, page_size, H]: the model's, then a drafter's


@flax.struct.dataclass
class RowState:
    """The rows. Positions, lengths and write slots are derived from them inside the programs."""

    last_token: Int[Array, " R"]  # what each row sampled last
    num_computed: Int[Array, " R"]
    page_table: Int[Array, "G R M"]
    drafts: Int[Array, "R K"] | None = None  # of each row's next tokens, NO_DRAFT where there is none
    aux: Float[Array, "R AD"] | None = None  # what a head reads of the model at each row's last computed token


def row_state_specs(
    shape: StateShape, sharding: Sharding | None, max_drafts: int = 0, aux_size: int = 0, dtype: str = "float32"
) -> RowState:
    """Returns the abstract values of the rows.

    Args:
        max_drafts: of a row; 0: nothing is drafted.
        aux_size: the numbers of `dtype` that a head reads of the model at each token; 0: no head drafts.
    """

    def spec(*dims: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    return RowState(
        last_token=spec(shape.rows),
        num_computed=spec(shape.rows),
        page_table=spec(shape.groups, shape.rows, shape.pages_per_row),
        drafts=spec(shape.rows, max_drafts) if max_drafts else None,
        aux=spec(shape.rows, aux_size, dtype=dtype) if aux_size else None,
    )


def make_zeros[T](specs: T) -> T:
    """Returns arrays of zeros with the shapes, dtypes and shardings of `specs`, made on their devices.

    Masked page slots are still read, and uninitialised memory could hold NaN.
    """
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=spec.sharding), specs)
