"""Paged attention for JAX: one public call, several implementations, one page layout.

Stands alone (jax and numpy only). Names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "attend_with_update": "api",
    "choose_impl": "api",
    "ragged_paged_attention": "api",
    "update_kv_pages": "api",
    "gather_logical": "layout",
    "page_bytes": "layout",
    "pool_shape": "layout",
    "AttnParams": "spec",
    "BatchMeta": "spec",
    "KVSpec": "spec",
    "prepare_batch": "spec",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
