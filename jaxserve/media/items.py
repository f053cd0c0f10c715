"""An image as a family's tower takes it, and its place in a prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Grid = tuple[int, int, int]  # frames, rows and columns of patches


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """An image, resized, before its values become floating point: an eighth of the bytes of its patches.

    `ImageProcessor.make_patches` makes the tower's input of `pixels`.
    """

    digest: bytes  # 32 bytes, of all that the tower's output depends on but the weights
    pixels: NDArray[np.uint8] = field(repr=False)  # [height, width, 3], RGB, read-only
    grid: Grid
    num_tokens: int  # placeholders in the prompt, one for each vector that the text model reads


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
