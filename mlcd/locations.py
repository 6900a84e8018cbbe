"""Locations of images and artifacts: local paths, or fsspec URLs such as s3://bucket/photos.

An artifact at a URL has a local copy, whose path encodes the URL; `mlcd.artifacts.copies` keeps
both in sync.
"""

import os
import re
from pathlib import Path
from typing import Final, TypeAlias

from platformdirs import user_cache_path

from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command, install_command_for

Location: TypeAlias = str | os.PathLike[str]
# the extra of mlcd that installs the file system of each protocol
_EXTRAS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "hf": "hf",
}
_WEB_PROTOCOLS: Final = ("http", "https", "ftp")
# names of query fields that grant access, of Amazon, Google, Azure and others
_CREDENTIAL_FIELD: Final = re.compile(
    r"[?&](x-(amz|goog)-(signature|credential|security-token)|awsaccesskeyid|signature|sig"
    r"|(access_|auth)?token|api_?key|password)=",
    re.IGNORECASE,
)
_ONE_SLASH: Final = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")


def is_url(location: Location) -> bool:
    """Returns whether a location is a URL, including chained ones such as `zip://a::s3://b`."""
    return "://" in os.fspath(location)


def local_path(location: Location) -> Path:
    """Returns the location as a path.

    Raises ConfigInvalid for a URL, which would otherwise become a folder named `s3:`.
    """
    if is_url(check_no_credentials(location)):
        raise ConfigInvalid(
            f"this must be a local path, got the URL {location}",
            remedy="give a path; only images and artifacts may be at URLs",
        )
    return Path(location)


def artifact_path(location: Location) -> Path:
    """Returns the path of an artifact; for a URL, the path of its copy on this machine.

    Raises ConfigInvalid for a URL that is not a directory in a store.
    """
    text = check_no_credentials(location).removeprefix("file://")
    if not is_url(text):
        return Path(text)
    store, _, key = text.partition("://")
    if store in _WEB_PROTOCOLS:
        raise ConfigInvalid(
            f"an artifact must be in a store, got the web address {text}",
            remedy="give the URL of a store, such as s3://bucket/artifact",
        )
    parts = key.rstrip("/").split("/")
    if not store.isalnum() or any(part in ("", ".", "..") for part in parts):
        raise ConfigInvalid(
            f"the URL of an artifact must be a directory in a store, got {text}",
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
    """Returns the location of a path for other machines: the URL of an artifact's copy, or else the
    absolute path.
    """
    return url_of(path) or str(path.resolve())


def relative_location(path: Path, out: Path) -> str:
    """Returns the location of `path` for the manifest at `out`: the relative path if both are local
    or in the same bucket, otherwise the URL or the absolute path.
    """
    path, out = path.resolve(), out.resolve()
    url, out_url = url_of(path), url_of(out)
    if _bucket_of(url) == _bucket_of(out_url):
        return os.path.relpath(path, out)
    return location_of(path)


def show_location(text: str) -> str:
    """Returns `text` with the paths of artifact copies replaced by their URLs."""
    return re.sub(rf"{re.escape(str(copies_folder()))}/([a-z0-9]+)/", r"\1://", text)


def copies_folder() -> Path:
    """Returns the folder of local copies of artifacts at URLs."""
    return user_cache_path("mlcd", appauthor=False) / "artifacts"


def _bucket_of(url: str | None) -> str | None:
    """Returns protocol and bucket of a URL; None for None."""
    return None if url is None else "/".join(url.split("/")[:3])


def check_no_credentials(location: Location) -> str:
    """Returns the location as text.

    Raises ConfigInvalid for a URL that contains credentials, which would end up in logs and
    manifests, and for a URL with `:/` instead of `://`.
    """
    text = os.fspath(location)
    if one_slash := _ONE_SLASH.match(text):
        raise ConfigInvalid(
            f"{text} is neither a path nor a URL", remedy=f"write {one_slash[1]}://, or ./{text}"
        )
    for url in text.split("::"):
        protocol, _, address = url.partition("://")
        user, has_user, _ = address.partition("/")[0].rpartition("@")
        # az://container@account does not contain a password
        if has_user and (":" in user or protocol in _WEB_PROTOCOLS):
            raise ConfigInvalid(
                f"the {protocol}:// URL must not contain a password",
                remedy="leave it out, and set it in the environment or in a profile of the store",
            )
        if _CREDENTIAL_FIELD.search(address):
            raise ConfigInvalid(
                f"the {protocol}:// URL must not contain a signature or a token",
                remedy="use the store's own protocol, such as s3://, or download the files",
            )
    return text


def install_command_for_url(location: str) -> str:
    """Returns the command that installs the file system of this URL's protocol."""
    from fsspec.registry import known_implementations

    protocol = location.rpartition("::")[2].partition("://")[0]
    if protocol in _EXTRAS:
        return install_command(_EXTRAS[protocol])
    package: str = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    # fsspec's extra for https is named http
    if package == "fsspec":
        return f"pip install 'fsspec[{protocol.removesuffix('s')}]'"
    return install_command_for(package)
