"""The places in object stores that jobs may read and write, as `Roots` are folders.

Stores do not have links: a URL without `..` leads nowhere else. Servers and workers have their
credentials, and need the same rights.
"""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mlcd.artifacts.directories import Directory
from mlcd.artifacts.manifest import MANIFEST, parse_manifest
from mlcd.errors import ConfigInvalid, Conflict, InvalidInput, MlcdError
from mlcd.locations import artifact_path, check_no_credentials
from mlcd.service.errors import BadRequest, OutsideRoots, Param

_WILDCARDS: Final = "*?["


class StoreRoots:
    """URLs such as s3://bucket/prefix. What is outside is refused alike, there or not."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises ConfigInvalid for a URL that cannot be opened."""
        for url in urls:
            Directory.at(url)
        self._urls = [url.rstrip("/") for url in urls]

    def resolve(self, location: str, param: Param) -> str:
        """Returns the URL without a slash at its end. Raises BadRequest, OutsideRoots."""
        url = location.rstrip("/")
        if "::" in url or any(unicodedata.category(character) == "Cc" for character in url):
            raise BadRequest(f"{param} must be one plain URL", param=param)
        if not self.holds(url):
            raise OutsideRoots(param)
        return url

    def holds(self, url: str) -> bool:
        """Tells whether the URL is in one of these places."""
        parts = url.partition("://")[2].split("/")
        is_plain = not any(part in ("", ".", "..") for part in parts)
        return is_plain and any(f"{url}/".startswith(f"{root}/") for root in self._urls)

    def check_embeddings(self, url: str) -> None:
        """Checks that there are finished embeddings, by their manifest. Raises InvalidInput."""
        try:
            kind = parse_manifest(Directory.at(url).read(MANIFEST), Path(url)).kind
        except MlcdError as error:
            raise no_embeddings() from error
        if kind != "embeddings":
            raise no_embeddings()

    def check_output(self, url: str, *, input_of_job: str) -> None:
        """Checks that nothing is there, and that it is outside of the input and of artifacts.

        Raises InvalidInput, and Conflict where something is there.
        """
        if any(character in url for character in _WILDCARDS):
            raise InvalidInput("the output has wildcards", remedy="name one place")
        _check_place(url)
        if f"{url}/".startswith(f"{input_of_job.rstrip('/')}/"):
            raise InvalidInput("the output must be outside the input", remedy="give another place")
        files = Directory.at(url).sizes()
        if MANIFEST in files:
            raise Conflict(
                "the output exists already", remedy="give another: nothing is overwritten"
            )
        if files:
            raise Conflict(
                "there are files at the output",
                remedy="give another; files of a canceled job are removed when a worker runs",
            )
        if any(Directory.at(above).has(MANIFEST) for above in self._above(url)):
            raise InvalidInput(
                "the output must be outside the output of another step", remedy="give another place"
            )

    def _above(self, url: str) -> list[str]:
        """Returns the places above this one that jobs may use, from the nearest on."""
        places = []
        while self.holds(url := url.rpartition("/")[0]):
            places.append(url)
        return places


def no_embeddings() -> InvalidInput:
    """Returns the refusal of an input other than embeddings."""
    return InvalidInput(
        "the input must be a finished embeddings artifact",
        remedy="name what `mlcd embed`, or a job of the kind embed, made",
    )


def _check_place(url: str) -> None:
    try:
        check_no_credentials(url)
        artifact_path(url)
    except ConfigInvalid as error:
        raise InvalidInput(error.message, remedy=error.remedy) from error
