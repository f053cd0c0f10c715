"""Images of Gemma 4: the largest size of their aspect that a number of tokens has room for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.media.items import Grid
from jaxserve.media.processors.patches import cut_rows
from jaxserve.media.processors.processor import Detail, ImageProcessor, read_limits
from jaxserve.media.processors.settings import ImageSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SOFT_TOKENS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True, slots=True)
class Gemma4Shape:
    """Small images grow, too. A token is `pooling_kernel_size` x `pooling_kernel_size` patches."""

    family: ClassVar[str] = "gemma4"
    max_soft_tokens: int
    patch_size: int
    pooling_kernel_size: int

    @property
    def most_patches(self) -> int:
        """Those of all tokens."""
        return self.max_soft_tokens * self.pooling_kernel_size**2

    @property
    def most_tokens(self) -> int:
        """`max_soft_tokens`."""
        return self.max_soft_tokens

    @property
    def least_patches(self) -> int:
        """Those of the fewest tokens."""
        return SOFT_TOKENS[0] * self.pooling_kernel_size**2

    def limit_patches(self, most: int) -> Self:
        """Returns the shape with fewer tokens."""
        room = min(most // self.pooling_kernel_size**2, self.max_soft_tokens)
        return replace(self, max_soft_tokens=max(count for count in SOFT_TOKENS if count <= room))

    def choose_size(self, height: int, width: int, field: str) -> tuple[int, int]:
        """Returns multiples of a token's edge, below the size that would have exactly the pixels of all tokens."""
        token = self.patch_size * self.pooling_kernel_size
        scale = math.sqrt(self.max_soft_tokens * token**2 / (height * width))
        rows, columns = (math.floor(scale * edge / token) for edge in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_soft_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_soft_tokens), 1
        return rows * token, columns * token

    def find_grid(self, height: int, width: int) -> Grid:
        """Returns one frame, and the rows and columns of patches."""
        return 1, height // self.patch_size, width // self.patch_size

    def count_tokens(self, grid: Grid) -> int:
        """Returns the number of squares of patches that are pooled."""
        return math.prod(grid) // self.pooling_kernel_size**2

    def cut(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the patches row by row, each [rows, columns, colours]. transformers pads their number; here none."""
        return cut_rows(pixels, self.patch_size, colours_last=True)

    def enlarge(self) -> Self:
        """Returns the shape of 1,120 tokens."""
        return replace(self, max_soft_tokens=SOFT_TOKENS[-1])

    def with_options(self, options: Mapping[str, Any], field: str) -> Self:
        """Returns the shape with `max_soft_tokens`."""
        given = read_limits(options, {"max_soft_tokens": self.max_soft_tokens}, field)
        if not set(given.values()) <= set(SOFT_TOKENS):
            fitting = (count for count in SOFT_TOKENS if count <= self.max_soft_tokens)
            message = f"must be one of {', '.join(map(str, fitting))}, got {given['max_soft_tokens']}"
            raise InvalidRequestError(message, field=f"{field}.max_soft_tokens", value=given["max_soft_tokens"])
        return replace(self, **given)

    def with_detail(self, detail: Detail) -> Self:
        """Returns the shape; "low" allows 70 tokens."""
        return replace(self, max_soft_tokens=SOFT_TOKENS[0]) if detail == "low" else self


def read_gemma4(settings: ImageSettings) -> ImageProcessor:
    """Returns the processor of a checkpoint."""
    shape = Gemma4Shape(
        settings.take_size("max_soft_tokens", 280),
        settings.take_size("patch_size", 16),
        settings.take_size("pooling_kernel_size", 3),
    )
    if shape.max_soft_tokens not in SOFT_TOKENS:
        message = f"must be one of {', '.join(map(str, SOFT_TOKENS))}"
        field = "preprocessor_config.json: max_soft_tokens"
        raise ConfigError(message, field=field, value=shape.max_soft_tokens)
    settings.take("size", None)  # written by transformers, which does not read it either
    if settings.take("do_normalize", False):
        raise ConfigError("must be false", field="preprocessor_config.json: do_normalize", value=True)
    form = replace(settings.take_form(3, (0.0,) * 3, (1.0,) * 3), mean=None, std=None)
    return ImageProcessor(form, shape)
