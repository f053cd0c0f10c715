"""Measured configurations of the kernels, looked up by shape."""

from __future__ import annotations

from pallas_kernels.tune.table import tune

__all__ = ["tune"]
