"""Parameters of many experts, in pieces that are small enough to be held twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.models.base import HostArray, ParamSpec
from jaxserve.core.sharding import AxisRules

MAX_PIECE_BYTES = 2**26


class Piece(NamedTuple):
    """A parameter on its devices by dotted path, or the part of it that is the `index`-th piece along `axis`.

    A piece has the parameter's sharding: it is the `index`-th of `count` equal runs of what each device has.
    """

    name: str
    array: jax.Array
    axis: int = 0
    index: int = 0
    count: int = 1


def count_pieces(spec: ParamSpec, *, mesh: Mesh, rules: AxisRules) -> int:
    """Returns the pieces that a parameter is read in: few, but at most 64 MiB each or one expert of each device."""
    if spec.piece_axis is None:
        return 1
    held = rules.sharding(mesh, spec.axes).shard_shape(spec.shape)[spec.piece_axis]
    fitting = (count for count in range(1, held) if held % count == 0 and spec.num_bytes <= count * MAX_PIECE_BYTES)
    return next(fitting, held)


@dataclass(frozen=True)
class HostPiece:
    """The `index`-th of `count` pieces of a host array along `axis`."""

    value: HostArray
    axis: int
    index: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(size // self.count if axis == self.axis else size for axis, size in enumerate(self.value.shape))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return self.value.dtype

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        """Returns what one device has of the piece: a run of what it has of the whole array."""
        start, stop, _ = place[self.axis].indices(self.shape[self.axis])
        size = stop - start
        first = start * self.count + self.index * size
        return self.value[*place[: self.axis], slice(first, first + size), *place[self.axis + 1 :]]
