"""The hosts that images may be fetched from, and the limits of the fetch."""

from dataclasses import dataclass

from mlcd.fetching.addresses import Network
from mlcd.fetching.hosts import ANY_HOST


@dataclass(frozen=True)
class FetchPolicy:
    """The limits of a fetch.

    hosts: names, addresses, `*.suffix` or `*`. networks: non-public networks in which hosts may
    have addresses. turn_s: timeout of one response in seconds, counted from its turn at the host;
    None for no limit. private: leaves details that describe the network out of messages.
    """

    hosts: tuple[str, ...] = (ANY_HOST,)
    networks: tuple[Network, ...] = ()
    ports: tuple[int, ...] = (80, 443)
    max_redirects: int = 3
    max_connections: int = 32
    max_connections_per_host: int = 8
    turn_s: float | None = None
    private: bool = False
