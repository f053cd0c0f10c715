"""Rows of a step one after the other or all together, as their device likes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def map_rows(function: Callable[..., Any], *columns: Any) -> Any:
    """Calls `function` with the row s of every array in `columns` (pytrees of [S, ...]), and stacks what it returns.

    A CPU takes one row after the other: a row's logits are then read from memory once and stay in the nearest cache for
    all that is done with them, and a branch that a row does not take costs nothing. Elsewhere all rows go together: a
    `lax.cond` computes both sides, and must not close over arrays that all rows share, each row would get a copy.
    """

    def run_one(row: tuple[Any, ...]) -> Any:
        return function(*lax.optimization_barrier(row))  # copied into the cache once, not by everything that reads it

    return lax.platform_dependent(*columns, cpu=lambda *columns: lax.map(run_one, columns), default=jax.vmap(function))
