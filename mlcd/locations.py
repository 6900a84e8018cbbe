"""The location of things: a path on this machine, or an fsspec URL such as s3://bucket/photos.

An artifact at a URL has a copy on this machine, at a path that tells the URL:
`mlcd.artifacts.copies` keeps the two alike.
"""

import os
import re
from pathlib import Path
from typing import Final, TypeAlias

from platformdirs import user_cache_path

from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command, install_command_for

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
_WEB: Final = ("http", "https", "ftp")
# names of query fields that give whoever has them access: of Amazon, Google, Azure and others
_SIGNED: Final = re.compile(
    r"[?&](x-(amz|goog)-(signature|credential|security-token)|awsaccesskeyid|signature|sig"
    r"|(access_|auth)?token|api_?key|password)=",
    re.IGNORECASE,
)
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
            f"{location} is a URL, and this has to be on this machine",
            remedy="give a path; images and artifacts may be at URLs",
        )
    return Path(location)


def artifact_path(location: Location) -> Path:
    """Returns the path of an artifact; for a URL, the path of its copy on this machine.

    Raises ConfigInvalid for a URL that does not name a directory of a store.
    """
    text = check_no_credentials(location).removeprefix("file://")
    if not is_url(text):
        return Path(text)
    store, _, inside = text.partition("://")
    if store in _WEB:
        raise ConfigInvalid(
            f"an artifact must be in a store, got the address of a web server: {text}",
            remedy="give a store's URL, such as s3://bucket/artifact",
        )
    parts = inside.rstrip("/").split("/")
    if not store.isalnum() or any(part in ("", ".", "..") for part in parts):
        raise ConfigInvalid(
            f"the URL of an artifact must name its directory in a store, got {text}",
            remedy="write it as s3://bucket/artifact, without .. or //",
        )
    return copies_folder().joinpath(store, *parts)


def url_of(path: Path) -> str | None:
    """Returns the URL of an artifact's copy; None for any other path."""
    try:
        store, *parts = path.resolve().relative_to(copies_folder().resolve()).parts
    except ValueError:
        return None
    return f"{store}://{'/'.join(parts)}"


def location_of(path: Path) -> str:
    """Returns where other machines find a path: the URL of an artifact's copy, else the whole
    path.
    """
    return url_of(path) or str(path.resolve())


def relative_location(path: Path, out: Path) -> str:
    """Returns where a path is, for one who reads the artifact at `out`: the way from there in one
    place, and the URL or the whole path between two places.
    """
    path, out = path.resolve(), out.resolve()
    url, of_out = url_of(path), url_of(out)
    if _store(url) == _store(of_out):
        return os.path.relpath(path, out)
    return location_of(path)


def show_location(text: str) -> str:
    """Returns a text for people, in which copies of artifacts are named by their URLs."""
    return re.sub(rf"{re.escape(str(copies_folder()))}/([a-z0-9]+)/", r"\1://", text)


def copies_folder() -> Path:
    """Returns the folder of the copies of artifacts that are at URLs."""
    return user_cache_path("mlcd", appauthor=False) / "artifacts"


def _store(url: str | None) -> str | None:
    """Returns the protocol and the bucket."""
    return None if url is None else "/".join(url.split("/")[:3])


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
        protocol, _, address = url.partition("://")
        user, is_given, _ = address.partition("/")[0].rpartition("@")
        # az://container@account has no password
        if is_given and (":" in user or protocol in _WEB):
            raise ConfigInvalid(
                f"there is a password in the {protocol}:// URL",
                remedy="leave it out: the environment or a profile of this process has it",
            )
        if _SIGNED.search(address):
            raise ConfigInvalid(
                f"there is a signature or a token in the {protocol}:// URL",
                remedy="use the store's own protocol, such as s3://, or download the files",
            )
    return text


def install_command_for_url(location: str) -> str:
    """Returns the command that installs what opens such URLs."""
    from fsspec.registry import known_implementations

    protocol = location.rpartition("::")[2].partition("://")[0]
    if protocol in _EXTRAS:
        return install_command(_EXTRAS[protocol])
    package: str = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    # the extra for https is [http]
    if package == "fsspec":
        return f"pip install 'fsspec[{protocol.removesuffix('s')}]'"
    return install_command_for(package)
