"""The table of a model whose matrices are packed for a CPU's product when they are loaded, and held in no other form.

`qkv.weight` [..., in, out] becomes `qkv.weight.packed`. Files, `update_weights` and adapters know only the matrix.
The head is packed, too, also where it is the embedding, whose rows are then its columns. Other parameters stay as they
are: experts, routers, other embeddings, quantized matrices, those whose sizes do not fit panels and tiles, and all of a
drafter.
"""

from __future__ import annotations

import dataclasses

from jaxserve.core.layers.linear import PACKED, PROJECTIONS
from jaxserve.core.models.base import DecoderConfig, Parameter, ParamSpec, Table
from pallas_kernels.cpu.packing import find_packed_shape

_WEIGHT = ".weight"


def pack_table(config: DecoderConfig, table: Table) -> Table:
    """Returns the table of a model's parameters, in which packed matrices have the source of the whole matrix."""
    packed: Table = {}
    for name, parameter in table.items():
        spec = _pack_spec(config, name, parameter.spec)
        packed |= {name: parameter} if spec is None else {f"{name}.{PACKED}": Parameter(spec, parameter.source)}
    return packed


def is_head(config: DecoderConfig, name: str) -> bool:
    """Whether a parameter is the head, which is [out, in]."""
    return config.generates and name == f"{config.embedding.head}{_WEIGHT}"


def _pack_spec(config: DecoderConfig, name: str, spec: ParamSpec) -> ParamSpec | None:
    """Returns the spec of a packed matrix; None for a parameter that stays as it is."""
    is_matrix = is_head(config, name) or (
        name.endswith(_WEIGHT) and name.split(".")[-2] in PROJECTIONS and ".experts." not in name
    )
    if not is_matrix or spec.dtype != config.dtype:
        return None
    shape = find_packed_shape(spec.shape, spec.dtype, transposed=is_head(config, name))
    return None if shape is None else dataclasses.replace(spec, shape=shape, axes=(None,) * len(shape))
