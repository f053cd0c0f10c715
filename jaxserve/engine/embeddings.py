"""From pooled arrays to the vectors that users read."""

from __future__ import annotations

from typing import Any


def read_embedding(vectors: Any, row: int) -> list[float]:
    """Returns one row of a step's pooled vectors [S, D] (`StepOutputs`)."""
    return vectors[row].tolist()
