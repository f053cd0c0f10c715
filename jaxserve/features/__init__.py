"""Step features: what an engine can do beyond serving plain steps, each beside the core that runs it.

`make_shapes` is where an engine gets its features; nothing below knows them by name.
"""

from __future__ import annotations

from jaxserve.features.choose import count_host_pages, make_shapes

__all__ = ["count_host_pages", "make_shapes"]
