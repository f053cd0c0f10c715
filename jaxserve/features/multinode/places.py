"""Places for connections that have proved nothing, of which each address has a share."""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter

_SITE_BITS = 64  # of an IPv6 address: whoever has one has all that begin so


class Places:
    """How many connections are held at once. Any thread may call it.

    Args:
        total: for all addresses together.
        share: for each of them.
    """

    def __init__(self, total: int, share: int) -> None:
        self._total, self._share = total, share
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, address: str) -> bool:
        """Takes a place for an IP address, if there is one for it."""
        site = _find_site(address)
        with self._lock:
            if self._taken.total() >= self._total or self._taken[site] >= self._share:
                return False
            self._taken[site] += 1
            return True

    def leave(self, address: str) -> None:
        """Gives back a place that was taken for this address."""
        site = _find_site(address)
        with self._lock:
            self._taken[site] -= 1
            if not self._taken[site]:
                del self._taken[site]


def _find_site(address: str) -> str:
    """Returns what counts as one address."""
    found = ipaddress.ip_address(address.partition("%")[0])  # a link-local one names its interface
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), _SITE_BITS), strict=False))
