"""The address of a Milvus server, read from a URL and the environment.

    milvus://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE][?tls=true&index=hnsw|ivf_flat]

For a URL without a user, MILVUS_USER and MILVUS_PASSWORD, or else MILVUS_TOKEN, are used.
"""

import os
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

from mlcd.collections.milvus.index_kinds import INDEX_KINDS, IndexKind
from mlcd.collections.store_urls import SHAPES, describe_store
from mlcd.errors import ConfigInvalid

_PORT: Final = 19530
_OPTIONS: Final = {"tls": ("true", "false"), "index": tuple(INDEX_KINDS)}
_FLAGS: Final = {"true": True, "false": False}
_UNTESTED: Final = "diskann"  # an index of Milvus that our test server cannot build


@dataclass(frozen=True)
class MilvusAddress:
    """The address of a Milvus server, and the account for its requests.

    shown: URL without credentials. token: USER:PASSWORD or an API key; empty without an account.
    index_kind: index of collections that are created through this address.
    """

    shown: str
    host: str
    port: int
    database: str
    tls: bool
    index_kind: IndexKind
    token: str = field(repr=False)

    @property
    def uri(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @classmethod
    def of(cls, url: str) -> Self:
        """Parses a URL. Raises ConfigInvalid, whose message does not contain credentials."""
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
        options = _read_options(shown, parts.query)
        return cls(
            shown,
            parts.hostname,
            port,
            database,
            _FLAGS[options.get("tls", "false")],
            INDEX_KINDS[options.get("index", "hnsw")],
            _choose_token(unquote(parts.username or ""), unquote(parts.password or "")),
        )


def _read_options(shown: str, query: str) -> dict[str, str]:
    options = {}
    for name, values in parse_qs(query, keep_blank_values=True).items():
        allowed = _OPTIONS.get(name)
        if allowed is None:
            raise ConfigInvalid(
                f"the URL of {shown} has an unknown option",
                remedy=f"options are {', '.join(_OPTIONS)}",
            )
        if name == "index" and values[-1].lower() == _UNTESTED:
            raise ConfigInvalid(
                f"the index {_UNTESTED} in the URL of {shown} is not offered (untested: the"
                " Milvus of our tests cannot build it)",
                remedy=f"give one of {', '.join(allowed)}",
            )
        if values[-1] not in allowed:
            raise ConfigInvalid(
                f"the option {name} of {shown} has an invalid value",
                remedy=f"give one of {', '.join(allowed)}",
            )
        options[name] = values[-1]
    return options


def _choose_token(user: str, password: str) -> str:
    environment = os.environ  # noqa: TID251 - as libpq does for Postgres; a command line shows passwords
    if user:
        return f"{user}:{password or environment.get('MILVUS_PASSWORD', '')}"
    if "MILVUS_USER" in environment:
        return f"{environment['MILVUS_USER']}:{environment.get('MILVUS_PASSWORD', '')}"
    return environment.get("MILVUS_TOKEN", "")
