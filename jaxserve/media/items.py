"""An image as a family's tower takes it, and the images of a prompt in their places."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Grid = tuple[int, int, int]  # frames, rows and columns of patches


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, resized and cut into patches, before its values become floating point.

    `ImageProcessor.make_floats` says which these are. All fields are plain values, so plans have items in them.
    """

    digest: bytes  # 32 bytes, of all that the tower's output depends on but the weights
    patches: bytes = field(repr=False)  # uint8 [N, values of a patch], in the order of `ImageShape.cut`
    grid: Grid
    num_tokens: int  # placeholders in the prompt, one for each vector that the text model reads

    @property
    def num_patches(self) -> int:
        """N."""
        return math.prod(self.grid)


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The place of an image in a prompt's ids, from its first placeholder to its last."""

    start: int
    length: int
    digest: bytes
    grid: Grid

    @property
    def end(self) -> int:
        """The index behind the last placeholder."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt."""

    items: tuple[MediaItem, ...]
    spans: tuple[MediaSpan, ...]  # where each is
    places: NDArray[np.int32]  # the indices of all placeholders in the prompt, ascending; an item's lie in its span
    # [3, end of the last span]: added to the position of each token, in models whose rotary positions have three parts
    shifts: NDArray[np.int32] | None = None
    rope_delta: int = 0  # added to the index of each token of the row, in front of `shifts`: how far the text moved


def digest_image(pixels: NDArray[np.uint8], family: str, settings: Mapping[str, Any]) -> bytes:
    """Returns the SHA-256 of an image as a tower takes it.

    The head in front of the pixels has a length of its own, so no two images can share a text by moving a border.

    Args:
        pixels: [height, width, 3], as the processor resized them.
        family: the processor's.
        settings: of the processor; JSON.
    """
    import numpy as np

    head = json.dumps(
        {"family": family, "mode": "RGB", "shape": pixels.shape, "settings": settings}, sort_keys=True
    ).encode()
    digest = hashlib.sha256(len(head).to_bytes(8, "big") + head)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
