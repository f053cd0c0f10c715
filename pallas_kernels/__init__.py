"""Paged attention and grouped products for JAX: one public call for each, several implementations, one page layout.

Stands alone (jax and numpy only). Names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "api": ("attend_stored", "attend_with_update", "store"),
    "grouped.api": ("choose_grouped_impl", "grouped_matmul"),
    "backends": ("choose_impl", "choose_layout", "resolve_impl"),
    "batch": ("prepare_batch",),
    "quantized": (
        *("XLA_PRODUCTS", "QuantizedArray", "QuantizedFormat", "QuantizedProducts"),
        *("dequantize", "quantize"),
    ),
    "quantized_products": ("choose_quantized_impl", "list_row_dtypes", "quantized_matmul"),
    "layout": ("gather_logical", "page_bytes", "pool_shape"),
    "spec": ("AttnLayer", "AttnParams", "AttnShape", "BatchMeta", "HeadParams", "KVSpec"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
