"""The positions of a prompt for rotary embeddings in three parts, as Qwen3-VL and its successors have them.

A text token has three equal positions. The tokens of an image share the first; the others are the row and the column
of its block. Behind an image positions go on where its longer edge ends, so there are fewer positions than tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.media.items import MediaSpan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def find_positions(num_tokens: int, spans: Sequence[MediaSpan], merge_size: int) -> tuple[NDArray[np.int32], int]:
    """Returns the positions of a prompt, and what is added to the index of each later token.

    Args:
        num_tokens: T, placeholders included.
        spans: of the prompt's images, in order; each has one placeholder for a block.
        merge_size: the edge of a block in patches.

    Returns:
        [3, T]: frame, row and column; and the difference from the index, 0 without images, else below.
    """
    import numpy as np

    positions = np.empty((3, num_tokens), np.int32)
    done = position = 0
    for span in spans:
        before = span.start - done
        positions[:, done : span.start] = np.arange(position, position + before)
        position += before
        rows, columns = span.grid[1] // merge_size, span.grid[2] // merge_size
        place = positions[:, span.start : span.end].reshape(3, rows, columns)
        place[0] = position
        place[1] = position + np.arange(rows)[:, None]
        place[2] = position + np.arange(columns)
        positions[:, span.start : span.end] = place.reshape(3, -1)
        position += max(rows, columns)
        done = span.end
    positions[:, done:] = np.arange(position, position + num_tokens - done)
    return positions, position - done
