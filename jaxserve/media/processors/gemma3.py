"""Images of Gemma 3: one size and one number of tokens for all. Pan and scan is off, as it is by default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxserve.errors import ConfigError
from jaxserve.media.items import Grid
from jaxserve.media.processors.patches import cut_rows
from jaxserve.media.processors.processor import Detail, ImageProcessor, read_limits
from jaxserve.media.processors.settings import ImageSettings, require_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Gemma3Shape:
    """Squares of `size` pixels, whatever the image's aspect."""

    family: ClassVar[str] = "gemma3"
    size: int
    patch_size: int
    num_tokens: int  # the tower's output is pooled to so many

    @property
    def most_patches(self) -> int:
        """Those of the one size."""
        return (self.size // self.patch_size) ** 2

    @property
    def most_tokens(self) -> int:
        """The one number."""
        return self.num_tokens

    @property
    def least_patches(self) -> int:
        """Those of the one size."""
        return self.most_patches

    def limit_patches(self, most: int) -> Self:
        """Returns the shape itself."""
        return self

    def choose_size(self, height: int, width: int, field: str) -> tuple[int, int]:
        """Returns the one size."""
        return self.size, self.size

    def find_grid(self, height: int, width: int) -> Grid:
        """Returns one frame, and the rows and columns of patches."""
        return 1, height // self.patch_size, width // self.patch_size

    def count_tokens(self, grid: Grid) -> int:
        """Returns the one number."""
        return self.num_tokens

    def cut(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the patches row by row, each [colours, rows, columns]."""
        return cut_rows(pixels, self.patch_size)

    def enlarge(self) -> Self:
        """Returns the shape: the checkpoint's are the largest."""
        return self

    def with_options(self, options: Mapping[str, Any], field: str) -> Self:
        """Returns the shape, which has no options."""
        read_limits(options, {}, field)
        return self

    def with_detail(self, detail: Detail) -> Self:
        """Returns the shape: an image of any detail has as many tokens."""
        return self


def read_gemma3(settings: ImageSettings) -> ImageProcessor:
    """Returns the processor of a checkpoint. The size of a patch is the published one; no file of images has it."""
    size = settings.take("size", {"height": 224, "width": 224})
    if not isinstance(size, Mapping) or size.get("height") != size.get("width"):
        raise ConfigError("must be a square", field="preprocessor_config.json: size", value=size)
    edge = require_size(size.get("height"), "size.height")
    patch_size = 14
    num_tokens = require_size(
        settings.processor.get("image_seq_length", settings.take("image_seq_length", 256)), "image_seq_length"
    )
    pooled = math.isqrt(num_tokens)
    if edge % patch_size or pooled**2 != num_tokens or (edge // patch_size) % pooled:
        message = f"{edge} pixels in patches of {patch_size} cannot be pooled to {num_tokens} tokens"
        raise ConfigError(message, field="preprocessor_config.json: size.height", value=edge)
    half = (0.5, 0.5, 0.5)
    return ImageProcessor(settings.take_form(2, half, half), Gemma3Shape(edge, patch_size, num_tokens))
