"""The location of things: a path on this machine, or, for images only, an fsspec URL such as
s3://bucket/photos.
"""

import os
from pathlib import Path
from typing import TypeAlias

from mlcd.errors import ConfigInvalid

Location: TypeAlias = str | os.PathLike[str]


def is_url(location: Location) -> bool:
    """Tells a URL from a path. `zip://a::s3://b` is one, too."""
    return "://" in os.fspath(location)


def local_path(location: Location) -> Path:
    """Returns the path.

    Raises ConfigInvalid for a URL, which would otherwise become a folder named `s3:`.
    """
    if is_url(location):
        raise ConfigInvalid(
            f"{location} is a URL, and only images can be read from one",
            remedy="give a directory here",
        )
    return Path(location)
