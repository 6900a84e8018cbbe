"""Parses lists of hosts, networks and ports, as written in environment variables."""

from ipaddress import ip_network
from typing import Final

from mlcd.fetching.addresses import Network
from mlcd.fetching.hosts import canonical_entry

_MAX_PORT: Final = 65535


def split_list(value: object) -> list[str]:
    """Returns the parts of a comma-separated text or of a list, without blanks."""
    parts = value.split(",") if isinstance(value, str) else value
    return (
        [str(part).strip() for part in parts if str(part).strip()]
        if isinstance(parts, list | tuple)
        else []
    )


def parse_hosts(value: object) -> list[str]:
    """Returns the hosts of a list. Raises ValueError."""
    entries = [entry for part in split_list(value) if (entry := canonical_entry(part))]
    if len(entries) < len(split_list(value)):
        raise ValueError("a host must be *, *.suffix, or a name or address without scheme and port")
    return entries


def parse_networks(value: object) -> list[Network]:
    """Returns the networks of a list. Raises ValueError."""
    try:
        return [ip_network(part) for part in split_list(value)]
    except ValueError:
        raise ValueError(
            "networks are written 10.1.0.0/16, with nothing after the bits that count"
        ) from None


def parse_ports(value: object) -> list[int]:
    """Returns the ports of a list. Raises ValueError."""
    ports = [int(part) if part.isascii() and part.isdigit() else 0 for part in split_list(value)]
    if not all(0 < port <= _MAX_PORT for port in ports):
        raise ValueError(f"ports are numbers from 1 to {_MAX_PORT}")
    return ports
