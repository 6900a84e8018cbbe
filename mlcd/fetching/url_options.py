"""The options of commands that fetch images."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mlcd.errors import ConfigInvalid
from mlcd.fetching.hosts import ANY_HOST
from mlcd.fetching.listed import parse_hosts, parse_networks, parse_ports
from mlcd.fetching.policy import FetchPolicy

_CONNECTIONS: Final = 64  # concurrent; most wait for slow hosts


@dataclass(frozen=True)
class UrlOptions:
    """The options, as plain values that can be sent to workers; metadata has each option's help."""

    column: str | None = field(
        default=None,
        metadata={"help": "IMAGES is a table: the images are at the URLs in this column."},
    )
    hosts: str = field(
        default=ANY_HOST,
        metadata={
            "help": "Hosts to fetch from, separated by commas: names, *.suffix, or * for public"
            " ones."
        },
    )
    networks: str = field(
        default="",
        metadata={"help": "Networks of the named hosts that are not public."},
    )
    ports: str = field(
        default="80,443", metadata={"help": "Ports to fetch from, separated by commas."}
    )
    timeout: float = field(
        default=10.0, metadata={"help": "Most seconds for one answer of a host."}
    )

    def policy(self) -> FetchPolicy:
        """Returns the policy. Raises ConfigInvalid, which names the invalid option."""
        if not 0 < self.timeout < float("inf"):
            raise ConfigInvalid("--url-timeout is not a time", remedy="give seconds")
        policy = FetchPolicy(
            hosts=_read("--url-hosts", parse_hosts, self.hosts),
            networks=_read("--url-networks", parse_networks, self.networks),
            ports=_read("--url-ports", parse_ports, self.ports),
            max_connections=_CONNECTIONS,
            turn_s=self.timeout,
        )
        if policy.networks and ANY_HOST in policy.hosts:
            raise ConfigInvalid(
                "--url-networks is for hosts that are named",
                remedy="name those that are in these networks with --url-hosts",
            )
        return policy


class JobUrlOptions(UrlOptions):
    """The options of jobs, whose errors are read by clients and not by operators."""

    def policy(self) -> FetchPolicy:
        return replace(super().policy(), private=True)


def _read(option: str, read: Callable[[object], Iterable[Any]], text: str) -> tuple[Any, ...]:
    try:
        return tuple(read(text))
    except ValueError as error:
        raise ConfigInvalid(f"{option} {text}: {error}") from error
