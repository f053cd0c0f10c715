"""The choices that an engine makes at its start about the images that it reads."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.media.processors import ImageProcessor
from jaxserve.media.prompt import ImageTokens


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How an engine reads images."""

    processor: ImageProcessor  # none of whose images has more than `max_patches`
    tokens: ImageTokens
    max_patches: int  # of all images of a step
    num_images: int  # that one request may have; at least 1
    merge_size: int | None = None  # a token's patches on each side, where rotary positions have three parts
