"""KV pages: who owns which, which may be reused, which hold a known prefix. Host only: ids, never arrays."""

from jaxserve.pages.manager import PageGroup, PageManager
from jaxserve.pages.pool import NULL_PAGE, PagePool

__all__ = ["NULL_PAGE", "PageGroup", "PageManager", "PagePool"]
