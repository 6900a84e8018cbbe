"""The location of things: a path on this machine, or an fsspec URL such as s3://bucket/photos.

Images are read from both, and `mlcd sync` copies artifacts between both; all else is local.
"""

import os
import re
from pathlib import Path
from typing import Final, TypeAlias

from mlcd.errors import ConfigInvalid

Location: TypeAlias = str | os.PathLike[str]
# the extra of mlcd for the file systems behind a protocol
_EXTRAS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "hf": "hf",
}
_ONE_SLASH: Final = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")


def is_url(location: Location) -> bool:
    """Tells a URL from a path. `zip://a::s3://b` is one, too."""
    return "://" in os.fspath(location)


def local_path(location: Location) -> Path:
    """Returns the path.

    Raises ConfigInvalid for a URL, which would otherwise become a folder named `s3:`.
    """
    if is_url(check_no_credentials(location)):
        raise ConfigInvalid(
            f"{location} is a URL, and only images can be read from one",
            remedy="give a directory here; `mlcd sync` copies artifacts",
        )
    return Path(location)


def check_no_credentials(location: Location) -> str:
    """Returns the location as text.

    Raises ConfigInvalid for a URL with a password in it, which would end up in logs and manifests,
    and for one with a slash too few.
    """
    text = os.fspath(location)
    if one_slash := _ONE_SLASH.match(text):
        raise ConfigInvalid(
            f"{text} is neither a path nor a URL", remedy=f"write {one_slash[1]}://, or ./{text}"
        )
    for url in text.split("::"):
        protocol, _, rest = url.partition("://")
        user, is_given, _ = rest.partition("/")[0].rpartition("@")
        if is_given and ":" in user:  # az://container@account has no password
            raise ConfigInvalid(
                f"there is a password in the {protocol}:// URL",
                remedy="leave it out: the environment or a profile of this process has it",
            )
    return text


def package_for(location: str) -> str:
    """Returns what to install for such URLs, as pip takes it."""
    from fsspec.registry import known_implementations

    protocol = location.rpartition("::")[2].partition("://")[0]
    if protocol in _EXTRAS:
        return f"'mlcd[{_EXTRAS[protocol]}]'"
    package: str = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    # the extra for https is [http]
    return package if package != "fsspec" else f"'fsspec[{protocol.removesuffix('s')}]'"
