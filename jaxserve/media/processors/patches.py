"""Cuts images into patches, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def cut_rows(pixels: NDArray[np.uint8], patch_size: int, *, colours_last: bool = False) -> NDArray[np.uint8]:
    """Returns [3, height, width] as patches [rows x columns, 3 x patch_size x patch_size].

    The values of a patch are in the order of [colour, row, column], or with `colours_last` [row, column, colour].
    """
    _, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    tiles = pixels.reshape(3, rows, patch_size, columns, patch_size)
    order = (1, 3, 2, 4, 0) if colours_last else (1, 3, 0, 2, 4)
    return tiles.transpose(order).reshape(rows * columns, -1)
