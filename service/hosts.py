"""Names and addresses of hosts in one form, and lists of them."""

import re
from ipaddress import IPv4Address, IPv6Address
from typing import Final

ANY_HOST: Final = "*"
_BELOW: Final = "*."
_NAME: Final = re.compile(
    r"(?=.{1,253}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*(?P<last>[a-z0-9_-]{1,63})"
)
# What resolvers take for a number, and so for an address: decimal, octal, hexadecimal.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")


def canonical_host(text: str) -> str | None:
    """A host in the one way that it is compared in, None where it is neither a name nor an address.

    An IPv6 address has brackets in `text` and none in the answer. A name that a resolver could read as a number is no
    name, and as an address it has only the form of four decimal numbers without leading zeros.
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
    """An entry of the list as it is compared: `*`, `*.suffix` or a host; None where it is none of them."""
    if text == ANY_HOST:
        return text
    host = canonical_host(text.removeprefix(_BELOW))
    if host is None or not text.startswith(_BELOW):
        return host
    is_address = ":" in host or host.rpartition(".")[2].isdigit()
    return None if is_address else f"{_BELOW}{host}"


def allows(entries: tuple[str, ...], host: str) -> bool:
    """`*.suffix` means every name below it and not the suffix itself."""
    return any(
        entry in (ANY_HOST, host) or (entry.startswith(_BELOW) and host.endswith(entry[1:]))
        for entry in entries
    )
