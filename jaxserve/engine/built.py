"""A runner with the choices that were made for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxserve.media.options import ImageOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxserve.core.runtime.memory import CachePlan
    from jaxserve.core.runtime.runner import ModelRunner
    from jaxserve.core.runtime.shapes import Shapes


@dataclass(frozen=True)
class BuiltRunner:
    """A runner, and the choices made for it."""

    shapes: Shapes
    mesh: Mesh
    plan: CachePlan
    runner: ModelRunner
    images: ImageOptions | None = None  # None: the model is served for text
