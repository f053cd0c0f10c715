"""Images of Pixtral and Mistral Small 3: as they are, or with the longest edge that is allowed; rows have an end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxserve.errors import ConfigError
from jaxserve.media.items import Grid
from jaxserve.media.processors.patches import cut_rows
from jaxserve.media.processors.processor import LOW_EDGE, Detail, ImageProcessor, read_limits
from jaxserve.media.processors.settings import ImageSettings, require_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PixtralShape:
    """Both edges grow to multiples of a block of `merge_size` x `merge_size` patches, which is one token."""

    family: ClassVar[str] = "pixtral"
    longest_edge: int
    patch_size: int
    merge_size: int

    @property
    def most_patches(self) -> int:
        """Those of a square with the longest edge."""
        return self.most_tokens * self.merge_size**2

    @property
    def most_tokens(self) -> int:
        """The blocks of such a square."""
        return math.ceil(self.longest_edge / (self.patch_size * self.merge_size)) ** 2

    @property
    def least_patches(self) -> int:
        """Those of a block."""
        return self.merge_size**2

    def limit_patches(self, most: int) -> Self:
        """Returns the shape with a shorter longest edge."""
        blocks = math.isqrt(most // self.merge_size**2)
        return replace(self, longest_edge=min(self.longest_edge, blocks * self.patch_size * self.merge_size))

    def choose_size(self, height: int, width: int, field: str) -> tuple[int, int]:
        """Returns the size, scaled to the longest edge if it is above that, and then rounded up to blocks."""
        ratio = max(height, width) / self.longest_edge
        if ratio > 1:  # a narrow image keeps a pixel; transformers would compute a block of none, and fail
            height, width = (max(1, math.floor(edge / ratio)) for edge in (height, width))
        block = self.patch_size * self.merge_size
        return -(-height // block) * block, -(-width // block) * block

    def find_grid(self, height: int, width: int) -> Grid:
        """Returns one frame, and the rows and columns of patches."""
        return 1, height // self.patch_size, width // self.patch_size

    def count_tokens(self, grid: Grid) -> int:
        """Returns the number of blocks. Ends of rows are tokens of the text (`ImageTokens.row_end`)."""
        return math.prod(grid) // self.merge_size**2

    def cut(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the patches row by row, each [colours, rows, columns]."""
        return cut_rows(pixels, self.patch_size)

    def enlarge(self) -> Self:
        """Returns the shape: the checkpoint's are the largest."""
        return self

    def with_options(self, options: Mapping[str, Any], field: str) -> Self:
        """Returns the shape with `longest_edge`."""
        return replace(self, **read_limits(options, {"longest_edge": self.longest_edge}, field))

    def with_detail(self, detail: Detail) -> Self:
        """Returns the shape; "low" allows edges of 512 pixels."""
        return replace(self, longest_edge=min(self.longest_edge, LOW_EDGE)) if detail == "low" else self


def read_pixtral(settings: ImageSettings) -> ImageProcessor:
    """Returns the processor of a checkpoint, whose blocks are settings of the processor around that of images."""
    size = settings.take("size", {"longest_edge": 1024})
    if not isinstance(size, Mapping):
        raise ConfigError("must have longest_edge", field="preprocessor_config.json: size", value=size)
    patch_size = settings.take_size("patch_size", 16)
    shape = PixtralShape(
        longest_edge=require_size(size.get("longest_edge"), "size.longest_edge"),
        patch_size=require_size(settings.processor.get("patch_size", patch_size), "patch_size"),
        merge_size=require_size(settings.processor.get("spatial_merge_size", 1), "spatial_merge_size"),
    )
    clip = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return ImageProcessor(settings.take_form(3, *clip), shape)
