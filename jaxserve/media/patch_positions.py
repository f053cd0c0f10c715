"""The places of patches in an image, and the positions of a table that is stretched over it (Qwen3-VL's towers).

The table has one vector for each cell of a square. Its corners lie on the image's corner patches, and each patch gets
the mean of the four cells around its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.media.items import Grid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def find_places(grid: Grid, merge_size: int) -> NDArray[np.int32]:
    """Returns the row and the column of each patch, [N, 2], in the order in which `Qwen3VLShape.cut` has them.

    Args:
        grid: frames, rows and columns; N is their product.
        merge_size: edge of a block of patches, which lie beside each other.
    """
    import numpy as np

    frames, rows, columns = grid
    blocks = (rows // merge_size, merge_size, columns // merge_size, merge_size)
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1, dtype=np.int32)
    ordered = places.reshape(*blocks, 2).swapaxes(1, 2).reshape(-1, 2)
    return np.tile(ordered, (frames, 1))


def stretch_table(grid: Grid, merge_size: int, side: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the cells around each patch and the weights of their vectors, each [N, 4], in the order of `find_places`.

    Args:
        side: cells in a row of the table; cells are counted row by row.
    """
    import numpy as np

    places = find_places(grid, merge_size)
    cells, weights = [], []
    for axis, size in enumerate(grid[1:]):
        place = places[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        first = np.floor(place)
        near = 1 - (place - first)
        cells.append(np.minimum(first.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), side - 1))
        weights.append(np.stack([near, 1 - near], -1))  # in this order: `place - first` may have other bits
    indices = cells[0][:, :, None] * np.int32(side) + cells[1][:, None, :]
    return indices.reshape(-1, 4), (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, 4)
