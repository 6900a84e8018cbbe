"""The addresses that a fetch may connect to: public addresses, and the policy's networks."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

# IANA's registries of special-purpose addresses, where the standard library's `is_global` differs.
# For IPv6, `is_global` lists only exceptions. A public address must be in the one range that IANA
# assigns to hosts, except for the special blocks in that range.
_SPECIAL_V4: Final = tuple(
    ip_network(block)
    for block in (
        "192.0.0.0/24",  # protocol assignments, a cloud's metadata (192.0.0.192)
        "192.88.99.0/24",  # relays of 6to4
        "168.63.129.16/32",  # a cloud's host behind an address that looks public
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
)
_UNICAST_V6: Final = ip_network("2000::/3")
_SPECIAL_V6: Final = tuple(
    ip_network(block)
    for block in (
        "2001::/23",  # protocol assignments, such as Teredo: embeds an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: embeds an IPv4 address
        "3fff::/20",  # documentation
    )
)
# NAT64: in a network without IPv4, the resolver returns these for hosts that have only IPv4. The
# embedded IPv4 address decides.
_TRANSLATED: Final = ip_network("64:ff9b::/96")
# Refused even inside a named network: no host of images has such an address.
_NEVER: Final = tuple(
    ip_network(block)
    for block in (
        "0.0.0.0/8",
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "100.100.100.200/32",
        "192.0.0.192/32",
        "168.63.129.16/32",
        "224.0.0.0/4",
        "255.255.255.255/32",
        "::/128",
        "fe80::/10",
        "fd00:ec2::254/128",
        "ff00::/8",
    )
)


def may_connect(text: str, networks: tuple[Network, ...]) -> bool:
    """Returns whether an address from a resolver is public or within `networks`.

    Text that is not an address gives False.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address in _TRANSLATED:
        address = IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in block for block in _NEVER):
        return False
    return any(address in block for block in networks) or _is_public(address)


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in block for block in _SPECIAL_V4)
    return (
        address in _UNICAST_V6
        and address.is_global
        and not any(address in block for block in _SPECIAL_V6)
    )
