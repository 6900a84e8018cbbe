"""The canonical form of host names and addresses, and lists of them."""

import re
from ipaddress import IPv4Address, IPv6Address
from typing import Final

ANY_HOST: Final = "*"
_BELOW: Final = "*."
_NAME: Final = re.compile(
    r"(?=.{1,253}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*(?P<last>[a-z0-9_-]{1,63})"
)
# Resolvers parse these as numbers, and so as addresses: decimal, octal, hexadecimal.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")


def canonical_host(text: str) -> str | None:
    """Returns the canonical form of a host; None if it is neither a name nor an address.

    An IPv6 address has brackets in `text` and none in the result. A host whose last label is a
    number is an address, and must be four decimal numbers without leading zeros.
    """
    lowered = text.lower()
    name = _NAME.fullmatch(lowered)
    try:
        if lowered[:1] + lowered[-1:] == "[]":
            return str(IPv6Address(lowered[1:-1]))
        if name is not None and _NUMBER.fullmatch(name["last"]):
            return str(IPv4Address(lowered))
    except ValueError:
        return None
    return None if name is None else lowered


def canonical_entry(text: str) -> str | None:
    """Returns the canonical form of `*`, `*.suffix` or a host; None for anything else."""
    if text == ANY_HOST:
        return text
    host = canonical_host(text.removeprefix(_BELOW))
    if host is None or not text.startswith(_BELOW):
        return host
    is_address = ":" in host or host.rpartition(".")[2].isdigit()
    return None if is_address else f"{_BELOW}{host}"


def allows(entries: tuple[str, ...], host: str) -> bool:
    """Returns whether a host matches an entry; `*.suffix` matches only names below the suffix."""
    return any(
        entry in (ANY_HOST, host) or (entry.startswith(_BELOW) and host.endswith(entry[1:]))
        for entry in entries
    )
