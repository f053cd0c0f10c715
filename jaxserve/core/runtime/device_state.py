"""State that stays on the device between steps and is always donated: the KV pools and the rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.core.runtime.inputs import StateShape

if TYPE_CHECKING:
    from jax.sharding import Sharding

KVCache = tuple[Any, ...]  # `models.decoder.Pools` of the model, then pools of pages of features


@flax.struct.dataclass
class RowState:
    """The rows. Positions, lengths and write slots are derived from them inside the programs."""

    last_token: Int[Array, " R"]  # what each row sampled last
    num_computed: Int[Array, " R"]
    page_table: Int[Array, "G R M"]
    drafts: Int[Array, "R K"] | None = None  # of each row's next tokens, NO_DRAFT where there is none
    columns: dict[str, Array] = flax.struct.field(default_factory=dict)  # of features, [R, ...]


def row_state_specs(
    shape: StateShape, sharding: Sharding | None, columns: Mapping[str, jax.ShapeDtypeStruct] = MappingProxyType({})
) -> RowState:
    """Returns the abstract values of the rows; `columns` are those of features."""

    def spec(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    return RowState(
        last_token=spec(shape.rows),
        num_computed=spec(shape.rows),
        page_table=spec(shape.groups, shape.rows, shape.pages_per_row),
        drafts=spec(shape.rows, shape.max_drafts) if shape.max_drafts else None,
        columns={name: spec(*column.shape, dtype=column.dtype) for name, column in columns.items()},
    )


def make_zeros[T](specs: T) -> T:
    """Returns arrays of zeros with the shapes, dtypes and shardings of `specs`, made on their devices.

    Masked page slots are still read, and uninitialised memory could hold NaN.
    """
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=spec.sharding), specs)
