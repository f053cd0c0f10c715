"""The tower of a family that reads images: the network that makes vectors for the text model of patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.models.base import DecoderConfig, Table
from jaxserve.media.items import MediaItem
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.prompt import ImageTokens

MutualLayers = Literal["all", "windowed"]
"""Layers of a text model: all of them, or those with a window."""


@dataclass(frozen=True)
class TowerConfig:
    """A tower, complete and hashable: the static argument of its functions.

    `blocks` are its transformer, without causal masks; its embedding and its head are not used, and its family is that
    of the text model. `merge_size`: a square of so many patches on each side is one vector. The outputs of
    `deep_layers` (ascending) become vectors, too, which are added behind the text model's first layers, one for each.
    `positions` is the side of a square table of positions, or the length of two tables. `rope` rotates each half of a
    head by a coordinate of the patch. The vectors of Pixtral's towers go through a `projector`, behind a norm of their
    own (`merger_norm`) and a product that joins a square's patches, if there is one. Those of Gemma 4's towers may have
    products between bounds (`clips`), and are rescaled (`standardizes`). In the `mutual` layers of the text model the
    tokens of an image see each other, wherever they are in it. The images of a step have at most `max_patches`.
    """

    blocks: DecoderConfig
    processor: ImageProcessor
    out_size: int  # D, of the text model
    merge_size: int
    deep_layers: tuple[int, ...] = ()
    positions: int = 0
    rope: RopeConfig | None = None
    projector: MLPConfig | None = None
    merger_norm: NormConfig | None = None
    clips: bool = False
    standardizes: bool = False
    mutual: MutualLayers | None = None
    max_patches: int = 0

    @property
    def num_parts(self) -> int:
        """Vectors of D numbers of one placeholder (P): its embedding, and those of deep layers."""
        return 1 + len(self.deep_layers)


@dataclass(frozen=True)
class Tower:
    """A family's tower: how it is read and computed.

    `processor` is a key of `media.processors.FAMILIES`. `modules` are those of the checkpoint that hold all parameters.
    `parse` reads config.json for a text model, whose dtype the tower gets; its errors name keys of `vision_config`, or
    of the file around it. `tokens` are those by which prompts show an image. `table` returns the parameters under
    canonical names. `arrange` makes the arrays of a batch of images of its items, by name, each [N, ...] for their N
    patches in a row; `inputs` describes them for N patches, a multiple of those of a vector.
    `run` computes these arrays, padded, in a context that has a batch whose rows are the images, a pool for the blocks'
    pages, and no rotation.
    """

    processor: str
    modules: tuple[str, ...]
    parse: Callable[[Mapping[str, Any], DecoderConfig, ImageProcessor], TowerConfig]
    tokens: Callable[[Mapping[str, Any]], ImageTokens]
    table: Callable[[TowerConfig], Table]
    arrange: Callable[[TowerConfig, Sequence[MediaItem]], dict[str, np.ndarray]]
    inputs: Callable[[TowerConfig, int], dict[str, jax.ShapeDtypeStruct]]
    run: Callable[[TowerConfig, Mapping[str, Any], Mapping[str, Array], LayerContext], Float[Array, "M P D"]]
