"""Images of Qwen3-VL, and of Qwen 3.5 and later: any size within limits of pixels, in blocks of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.media.items import Grid
from jaxserve.media.processors.processor import LOW_EDGE, Detail, ImageProcessor, read_limits
from jaxserve.media.processors.settings import ImageSettings, require_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_ASPECT = 200  # of the longer edge to the shorter one


@dataclass(frozen=True, slots=True)
class Qwen3VLShape:
    """Both edges become multiples of a block of `merge_size` x `merge_size` patches, which is one token."""

    family: ClassVar[str] = "qwen3_vl"
    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    @property
    def block(self) -> int:
        """The edge of a block of patches in pixels."""
        return self.patch_size * self.merge_size

    @property
    def most_patches(self) -> int:
        """The patches of all blocks that `max_pixels` have room for."""
        return self.most_tokens * self.merge_size**2

    @property
    def most_tokens(self) -> int:
        """The blocks that `max_pixels` have room for."""
        return self.max_pixels // self.block**2

    @property
    def least_patches(self) -> int:
        """The patches of `min_pixels`."""
        return -(-self.min_pixels // self.block**2) * self.merge_size**2

    def limit_patches(self, most: int) -> Self:
        """Returns the shape with a lower `max_pixels`.

        `min_pixels` is at most half of that: small images grow to it by whole blocks, and must not pass the limit.
        """
        if most >= self.most_patches:
            return self
        pixels = most // self.merge_size**2 * self.block**2
        return replace(self, min_pixels=min(self.min_pixels, pixels // 2), max_pixels=pixels)

    def choose_size(self, height: int, width: int, field: str) -> tuple[int, int]:
        """Returns the multiples of a block nearest to the size; scaled where the pixels leave the limits."""
        if max(height, width) > MOST_ASPECT * min(height, width):
            message = f"{width} x {height} is too narrow: the longer edge may have {MOST_ASPECT} times the shorter one"
            raise InvalidRequestError(message, field=field)
        block = self.block
        rows, columns = round(height / block), round(width / block)
        if rows * columns * block**2 > self.max_pixels:
            scale = math.sqrt((height * width) / self.max_pixels)
            rows, columns = (max(1, math.floor(edge / scale / block)) for edge in (height, width))
        elif rows * columns * block**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(edge * scale / block) for edge in (height, width))
        if rows * columns * block**2 > self.max_pixels:  # an edge that is less than a block gets one
            message = f"{width} x {height} would have more than {self.max_pixels} pixels (max_pixels): it is too narrow"
            raise InvalidRequestError(message, field=field)
        return rows * block, columns * block

    def find_grid(self, height: int, width: int) -> Grid:
        """Returns one frame, and the rows and columns of patches."""
        return 1, height // self.patch_size, width // self.patch_size

    def count_tokens(self, grid: Grid) -> int:
        """Returns the number of blocks."""
        return math.prod(grid) // self.merge_size**2

    def cut(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the patches block by block, each [colours, rows, columns]; the tower repeats it as its frames."""
        _, rows, columns = self.find_grid(*pixels.shape[1:])
        merge, patch = self.merge_size, self.patch_size
        blocks = pixels.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        # block rows, columns; rows, columns in it; colour; pixels
        return blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)

    def enlarge(self) -> Self:
        """Returns the shape: the checkpoint's are the largest."""
        return self

    def with_options(self, options: Mapping[str, Any], field: str) -> Self:
        """Returns the shape with `min_pixels` and `max_pixels`."""
        least = self.block**2
        given = read_limits(options, dict.fromkeys(("min_pixels", "max_pixels"), self.max_pixels), field, least=least)
        most = given.get("max_pixels", self.max_pixels)
        if given.get("min_pixels", 0) > most:
            message = f"must be at most max_pixels, {most}, got {given['min_pixels']}"
            raise InvalidRequestError(message, field=f"{field}.min_pixels", value=given["min_pixels"])
        return replace(self, min_pixels=given.get("min_pixels", min(self.min_pixels, most)), max_pixels=most)

    def with_detail(self, detail: Detail) -> Self:
        """Returns the shape; "low" allows 512 x 512 pixels."""
        if detail != "low":
            return self
        most = max(min(self.max_pixels, LOW_EDGE**2), self.block**2)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)


def read_qwen3_vl(settings: ImageSettings) -> ImageProcessor:
    """Returns the processor of a checkpoint; limits of pixels are in `size`, or in fields of older files."""
    size = settings.take("size", {})
    shape = Qwen3VLShape(
        min_pixels=require_size(settings.take("min_pixels", size.get("shortest_edge", 56 * 56)), "min_pixels"),
        max_pixels=require_size(settings.take("max_pixels", size.get("longest_edge", 28 * 28 * 1280)), "max_pixels"),
        patch_size=settings.take_size("patch_size", 14),
        temporal_patch_size=settings.take_size("temporal_patch_size", 2),
        merge_size=settings.take_size("merge_size", 2),
    )
    if not shape.block**2 <= shape.max_pixels or shape.min_pixels > shape.max_pixels:
        message = f"must be from {max(shape.min_pixels, shape.block**2)}, the least that an image has"
        raise ConfigError(message, field="preprocessor_config.json: size.longest_edge", value=shape.max_pixels)
    clip = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return ImageProcessor(settings.take_form(3, *clip), shape)
