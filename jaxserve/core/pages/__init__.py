"""KV pages: ownership, reuse and the prefix index. Host only: page ids, never arrays."""

from jaxserve.core.pages.manager import PageGroup, PageManager
from jaxserve.core.pages.pool import NULL_PAGE, PagePool

__all__ = ["NULL_PAGE", "PageGroup", "PageManager", "PagePool"]
