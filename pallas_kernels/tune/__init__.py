"""Measured configurations of the kernels, looked up by shape."""

from __future__ import annotations

from pallas_kernels.tune.table import KERNELS, TuneKey, lookup, tune, tune_key

__all__ = ["KERNELS", "TuneKey", "lookup", "tune", "tune_key"]
