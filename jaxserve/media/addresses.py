"""Tells addresses of the public internet from all others, in each form that IPv6 gives those of IPv4.

The networks are those of IANA's registries of special addresses. They are listed here because Python's own lists,
behind `is_global`, differ from one patch release to the next.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_SPECIAL_IPV4 = tuple(
    map(
        IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            "168.63.129.16/32",  # metadata in Azure; in other clouds they are in networks above
        ),
    )
)
_GLOBAL_IPV6 = IPv6Network("2000::/3")  # all that is routed in the public internet
_SPECIAL_IPV6 = (
    IPv6Network("2001::/23"),  # protocols, among them Teredo, which leads to an address of IPv4
    IPv6Network("2001:db8::/32"),
    IPv6Network("2002::/16"),  # 6to4, which does so too
    IPv6Network("3fff::/20"),
)
_NAT64 = IPv6Network("64:ff9b::/96")  # a gateway's, with an address of IPv4 in the last 32 bits


def is_public(text: str) -> bool:
    """Whether an address is one of a host in the public internet; False for what is no address.

    The address of a gateway of NAT64 with a prefix of its own looks like any other, so it is not recognised.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        embedded = address.ipv4_mapped
        if embedded is None and address in _NAT64:
            embedded = IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is None:
            return address in _GLOBAL_IPV6 and not any(address in network for network in _SPECIAL_IPV6)
        address = embedded
    return not any(address in network for network in _SPECIAL_IPV4)
