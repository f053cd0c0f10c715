"""Vectors of images in place of their placeholders' embeddings."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.core.layers.embedding import EmbeddingConfig, embed_images, embed_tokens
from jaxserve.request import FIRST_IMAGE_ROW

CONFIG = EmbeddingConfig(5, tied=True, scale=2.0)
TABLE = np.arange(10, dtype=np.float32).reshape(5, 2)
ROWS = 100 + np.arange(4 * 3 * 2, dtype=np.float32).reshape(4, 3, 2)  # of four rows three vectors each


def test_ids_below_the_first_row_are_rows() -> None:
    """The first vector takes the embedding's place, unscaled; the others are added behind layers, 0 for texts."""
    ids = jnp.asarray([4, FIRST_IMAGE_ROW, FIRST_IMAGE_ROW - 3, 0])
    leaf = {"weight": jnp.asarray(TABLE), "images": jnp.asarray(ROWS)}
    x, added = embed_images(leaf, ids, embed_tokens(CONFIG, leaf, ids))
    np.testing.assert_array_equal(x, [2 * TABLE[4], ROWS[0, 0], ROWS[3, 0], 2 * TABLE[0]])
    assert len(added) == 2
    for part, found in enumerate(added, 1):
        np.testing.assert_array_equal(found, [[0, 0], ROWS[0, part], ROWS[3, part], [0, 0]])


def test_programs_that_read_no_images_have_none() -> None:
    ids = jnp.asarray([1, 2])
    leaf = {"weight": jnp.asarray(TABLE)}
    x = embed_tokens(CONFIG, leaf, ids)
    same, added = embed_images(leaf, ids, x)
    assert same is x and added == ()
