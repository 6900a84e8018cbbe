"""The one parser of image URLs; nothing parses its results again."""

import re
from dataclasses import dataclass, field
from typing import Final, Literal, cast
from urllib.parse import urljoin

from mlcd.errors import ImageRejected
from mlcd.fetching.hosts import canonical_host

Scheme = Literal["http", "https"]

_MAX_LENGTH: Final = 8192
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_MAX_PORT: Final = 65535
# The characters of RFC 3986, and square brackets, which queries often contain; the fragment after #
# is not sent.
_URL: Final = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>(?:[/?][a-z0-9._~:/?@!$&'()*+,;=%\[\]-]*)?)"
    r"(?:\#[!-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_WITH_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_REMEDY: Final = (
    "send http(s)://host/path in ASCII (percent-encoded, an international name as xn--…),"
    " without user name, spaces and backslashes"
)


@dataclass(frozen=True)
class Url:
    """A parsed URL.

    host: in lower case; a name, or an address in its canonical form. target: path and query, at
    least "/".
    """

    scheme: Scheme
    host: str
    port: int
    target: str = field(repr=False)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def shown(self) -> str:
        """The URL for messages: without its query, which may contain a secret."""
        return f"{self.scheme}://{self.authority}{self.target.partition('?')[0]}"

    def join(self, reference: str) -> "Url":
        """Returns the target of a redirect from this URL; reference: an absolute or relative URL.

        Raises ImageRejected as `parse_url` does.
        """
        if not reference.isascii() or not reference.isprintable():
            raise _unreadable()
        try:
            base = f"{self.scheme}://{self.authority}{self.target}"
            return parse_url(
                reference if _WITH_SCHEME.match(reference) else urljoin(base, reference)
            )
        except ValueError as error:
            raise _unreadable() from error


def parse_url(text: str) -> Url:
    """Parses a URL.

    Raises ImageRejected unless it is a plain http or https URL without a user name, odd characters
    or an odd form of an address.
    """
    match = _URL.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    host = None if match is None else canonical_host(match["host"])
    if match is None or host is None:
        raise _unreadable()
    scheme = cast(Scheme, match["scheme"].lower())
    port = int(match["port"] or _DEFAULT_PORTS[scheme])
    if not 0 < port <= _MAX_PORT:
        raise _unreadable()
    target = match["target"]
    return Url(scheme, host, port, target if target.startswith("/") else f"/{target}")


def _unreadable() -> ImageRejected:
    return ImageRejected("url-refused", "the URL is not one that can be fetched", remedy=_REMEDY)
