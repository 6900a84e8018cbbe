"""URLs of images: the one parser. What it finds is connected to as it stands, and nothing parses it again."""

import re
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import urljoin

from mlcd.errors import ImageRejected

Scheme = Literal["http", "https"]

_MAX_LENGTH: Final = 8192
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_MAX_PORT: Final = 65535
# The characters of RFC 3986, and square brackets, which queries often hold; the part after # stays here.
_URL: Final = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>(?:[/?][a-z0-9._~:/?@!$&'()*+,;=%\[\]-]*)?)"
    r"(?:\#[!-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_NAME: Final = re.compile(r"(?=.{1,253}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*(?P<last>[a-z0-9_-]{1,63})")
# What resolvers take for a number, and so for an address: decimal, octal, hexadecimal.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_WITH_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_REMEDY: Final = (
    "send http(s)://host/path in ASCII (percent-encoded, an international name as xn--…), without user name, spaces"
    " and backslashes"
)


@dataclass(frozen=True)
class ImageUrl:
    """A string that begins as a URL does, where an image is expected: unread, and never shown."""

    text: str = field(repr=False)


GivenImage: TypeAlias = bytes | ImageRejected | ImageUrl
"""What a request holds where an image is expected."""


@dataclass(frozen=True)
class Url:
    """host: lower case; a name, or an address in its canonical form. target: path and query, at least "/"."""

    scheme: Scheme
    host: str
    port: int
    target: str = field(repr=False)

    @property
    def authority(self) -> str:
        """As the Host header says it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def joined(self, reference: str) -> "Url":
        """What a redirect from here says: a URL, or a part of one. Raises ImageRejected as `parse_url`."""
        if not reference.isascii() or not reference.isprintable():
            raise _unreadable()
        try:
            base = f"{self.scheme}://{self.authority}{self.target}"
            return parse_url(reference if _WITH_SCHEME.match(reference) else urljoin(base, reference))
        except ValueError as error:
            raise _unreadable() from error


def parse_url(text: str) -> Url:
    """Raises ImageRejected for all but plain http and https URLs: no user name, no odd character, no odd address."""
    found = _URL.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    host = None if found is None else canonical_host(found["host"])
    if found is None or host is None:
        raise _unreadable()
    scheme = cast(Scheme, found["scheme"].lower())
    port = int(found["port"] or _DEFAULT_PORTS[scheme])
    if not 0 < port <= _MAX_PORT:
        raise _unreadable()
    target = found["target"]
    return Url(scheme, host, port, target if target.startswith("/") else f"/{target}")


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


def _unreadable() -> ImageRejected:
    return ImageRejected("url-refused", "the URL is not one that can be fetched", remedy=_REMEDY)
