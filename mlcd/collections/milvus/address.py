"""The address of a Milvus server, as a URL and the environment give it.

    milvus://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE][?tls=true&index=hnsw|ivf_flat]

MILVUS_USER and MILVUS_PASSWORD, or MILVUS_TOKEN, are used for a URL without a user.
"""

import os
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

from mlcd.collections.milvus.graph_kinds import GRAPHS, Graph
from mlcd.collections.store_urls import SHAPES, describe_store
from mlcd.errors import ConfigInvalid

_PORT: Final = 19530
_OPTIONS: Final = {"tls": ("true", "false"), "index": tuple(GRAPHS)}
_FLAGS: Final = {"true": True, "false": False}
_NOT_BUILT: Final = "diskann"  # an index of Milvus that the server of our tests cannot make


@dataclass(frozen=True)
class MilvusAddress:
    """The place of a Milvus, and the account by which it is asked.

    shown: the URL without credentials. token: USER:PASSWORD, or an API key; empty: none. graph: the
    index of collections that are made through this address.
    """

    shown: str
    host: str
    port: int
    database: str
    tls: bool
    graph: Graph
    token: str = field(repr=False)

    @property
    def uri(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @classmethod
    def of(cls, url: str) -> Self:
        """Parses a URL. Raises ConfigInvalid, without the URL's credentials."""
        parts = urlsplit(url)
        shown = describe_store(url)
        try:
            port = parts.port or _PORT
        except ValueError as error:
            raise ConfigInvalid(
                f"{shown} needs a valid port", remedy="for example 19530"
            ) from error
        database = unquote(parts.path.strip("/"))
        if not parts.hostname or "/" in database:
            raise ConfigInvalid(f"{shown} is not an address", remedy=f"give {SHAPES['milvus']}")
        chosen = _read_options(shown, parts.query)
        return cls(
            shown,
            parts.hostname,
            port,
            database,
            _FLAGS[chosen.get("tls", "false")],
            GRAPHS[chosen.get("index", "hnsw")],
            _token(unquote(parts.username or ""), unquote(parts.password or "")),
        )


def _read_options(shown: str, query: str) -> dict[str, str]:
    chosen = {}
    for name, values in parse_qs(query, keep_blank_values=True).items():
        allowed = _OPTIONS.get(name)
        if allowed is None:
            raise ConfigInvalid(
                f"the URL of {shown} has an option that is not known",
                remedy=f"options are {', '.join(_OPTIONS)}",
            )
        if name == "index" and values[-1].lower() == _NOT_BUILT:
            raise ConfigInvalid(
                f"the index {_NOT_BUILT} that the URL of {shown} asks for is not offered (no Milvus"
                " of our tests builds it)",
                remedy=f"give one of {', '.join(allowed)}",
            )
        if values[-1] not in allowed:
            raise ConfigInvalid(
                f"the option {name} of {shown} has another value than it can",
                remedy=f"give one of {', '.join(allowed)}",
            )
        chosen[name] = values[-1]
    return chosen


def _token(user: str, password: str) -> str:
    environment = os.environ  # noqa: TID251 - as libpq does for Postgres; a command line shows passwords
    if user:
        return f"{user}:{password or environment.get('MILVUS_PASSWORD', '')}"
    if "MILVUS_USER" in environment:
        return f"{environment['MILVUS_USER']}:{environment.get('MILVUS_PASSWORD', '')}"
    return environment.get("MILVUS_TOKEN", "")
