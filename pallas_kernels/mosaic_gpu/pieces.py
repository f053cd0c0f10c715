"""Copies of as many rows as only the device knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.experimental import pallas as pl


def for_pieces(count: jax.Array, most: int, copy: Callable[[jax.Array, int], None]) -> None:
    """Calls `copy(start, size)` for pieces that make up `count` rows, at most `most`; for none if `count` is below 1.

    A copy's size is static, so pieces are powers of two, the largest first.
    """
    for bit in reversed(range(most.bit_length())):
        size, start = 1 << bit, count >> (bit + 1) << (bit + 1)
        pl.when((count > 0) & (count & size > 0))(partial(copy, start, size))
