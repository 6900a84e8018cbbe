"""The hosts that images may be fetched from, and how many at one time."""

from dataclasses import dataclass

from mlcd.fetching.addresses import Network
from mlcd.fetching.hosts import ANY_HOST


@dataclass(frozen=True)
class FetchPolicy:
    """The bounds of a fetch.

    hosts: names, addresses, `*.suffix` or `*`. networks: those in which they may have addresses
    that are not public. turn_s: seconds for one answer, from its turn at the host; None for no
    limit. private: messages do not tell what was seen on the way, which describes the network.
    """

    hosts: tuple[str, ...] = (ANY_HOST,)
    networks: tuple[Network, ...] = ()
    ports: tuple[int, ...] = (80, 443)
    max_redirects: int = 3
    max_connections: int = 32
    max_connections_per_host: int = 8
    turn_s: float | None = None
    private: bool = False
