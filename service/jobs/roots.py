"""The places that jobs may read and write: folders, from which neither `..` nor a link leads out,
and places in object stores.
"""

import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from fsspec.utils import glob_translate

from mlcd.artifacts.manifest import MANIFEST, draft_path
from mlcd.errors import ConfigInvalid, Conflict, InvalidInput, MlcdError
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.names import is_candidate
from mlcd.locations import is_url
from mlcd.service.errors import BadRequest, OutsideRoots, Param
from mlcd.service.jobs.stores import StoreRoots, no_embeddings

_WILDCARDS: Final = "*?["
_DRAFT: Final = draft_path(Path("name")).suffix
# The longest name of an output, in bytes. Drafts, and the names they get when they are removed, are
# longer; 255 is the limit.
_NAME_BYTES: Final = 200


class OtherRoots(ConfigInvalid):
    """The server that accepted a job may use other folders than the worker."""

    name = "other-roots"

    def __init__(self, param: Param) -> None:
        super().__init__(
            f"the job's {param} is in no folder that this worker may use",
            remedy="start one with the MLCD_JOBS__ROOTS of the server",
        )


class PlaceMoved(Conflict):
    """A folder was replaced by a link after the job was accepted."""

    name = "place-moved"

    def __init__(self, param: Param) -> None:
        super().__init__(
            f"the job's {param} leads elsewhere than when the job was accepted",
            remedy="put the folder back and retry the job, or submit it anew",
        )


class Roots:
    """Absolute folders, and URLs. Places outside get the same error, whether they exist or not.

    web: how to fetch images from URLs that an input names; None to refuse such inputs. private: a
    folder that counts as outside although it may lie in one of the places; a folder that contains
    it cannot be an input.
    """

    def __init__(
        self,
        places: Sequence[str],
        web: UrlOptions | None = None,
        *,
        private: Path | None = None,
    ) -> None:
        """Raises ConfigInvalid for a folder that does not exist."""
        self._private = private
        urls = [place for place in places if is_url(place)]
        self._stores, self._takes_urls, self._web = StoreRoots(urls), bool(urls), web
        folders = [place for place in places if not is_url(place)]
        for folder in folders:
            if not Path(folder).is_dir():
                raise ConfigInvalid(
                    f"MLCD_JOBS__ROOTS: {folder} is not a folder", remedy="make it, or leave it out"
                )
        self._real = [Path(os.path.realpath(folder)) for folder in folders]
        self._named = [*map(Path, folders), *self._real]

    def resolve_input(self, location: str) -> str:
        """Returns `location` with its links followed; the part with wildcards stays as it is.

        Raises BadRequest unless it is a plain path or URL, and OutsideRoots.
        """
        if self._takes_urls and is_url(location):
            return self._stores.resolve(location, "input")
        fixed, pattern = _split_wildcards(self._parse_path(location, "input"))
        real = self._real_path(fixed, "input")
        if not pattern and self._private is not None and self._private.is_relative_to(real):
            raise OutsideRoots("input")
        return str(real.joinpath(*pattern))

    def resolve_output(self, location: str) -> str:
        """Returns `location` with the links of its parent followed, as `resolve_input`; the last
        part need not exist.
        """
        if self._takes_urls and is_url(location):
            return self._stores.resolve(location, "output")
        path = self._parse_path(location, "output")
        return str(self._real_path(path.parent, "output") / path.name)

    def check_input(self, real: str, *, url_column: str | None = None) -> None:
        """Checks a resolved input: a folder, a file, a list or a glob of some, with something to
        read in it.

        Raises OutsideRoots where a wildcard leads outside, InvalidInput.
        """
        # It reads tables, and a server without jobs never does.
        from mlcd.images.source import FilesSource
        from mlcd.images.sources import open_source

        try:
            source = open_source(real, urls=self._web)
            if self._web is not None and url_column is not None:
                open_source(real, urls=replace(self._web, column=url_column))
        except MlcdError as error:
            raise InvalidInput(error.message, remedy=error.remedy) from error
        if is_url(real):
            return
        self.check_files(source.paths)
        for path in source.paths if isinstance(source, FilesSource) else []:
            if not Path(path).is_file():  # opening a FIFO would block until a writer comes
                raise InvalidInput(
                    "a folder or a pipe has the name of an archive of the input",
                    remedy="leave these out",
                )
        if next(_readable(source.paths or _walk(Path(real))), None) is None:
            remedy = "is it empty, or closed to the server? name tables as FOLDER/*.parquet"
            raise InvalidInput("nothing of the input can be read as images", remedy=remedy)

    def check_embeddings(self, real: str) -> None:
        """Checks a resolved input: an embeddings artifact. Raises InvalidInput, and
        OutsideRoots where one of its files leads outside.
        """
        if is_url(real):
            self._stores.check_embeddings(real)
            return
        from mlcd.artifacts.embeddings import EmbeddingsArtifact

        try:
            opened = EmbeddingsArtifact.open(Path(real))
        except (MlcdError, OSError) as error:
            raise no_embeddings() from error
        self.check_files([str(Path(real) / name) for name in opened.artifact.files])

    def check_output(self, real: str, *, input_of_job: str) -> None:
        """Checks a resolved output: nothing is there yet, and a folder can be made, outside the
        resolved input.

        Raises InvalidInput, and Conflict where something is there.
        """
        if is_url(real):
            self._stores.check_output(real, input_of_job=input_of_job)
            return
        out = Path(real)
        folder, draft = out.parent, draft_path(out)
        if os.path.lexists(out):
            raise Conflict(
                "the output exists already", remedy="give another: nothing is overwritten"
            )
        if os.path.lexists(draft):
            raise Conflict(
                f"unfinished work is at the output, as {draft.name}",
                remedy="give another; files of a canceled job are removed when a worker runs;"
                f" otherwise finish it with `mlcd label` or `mlcd embed`, or remove {draft.name}",
            )
        if out.suffix == _DRAFT:
            raise InvalidInput(
                f"the output ends with {_DRAFT}",
                remedy="that is what unfinished outputs are called",
            )
        if len(os.fsencode(out.name)) > _NAME_BYTES:
            raise InvalidInput(
                f"the output's name has more than {_NAME_BYTES} bytes", remedy="give a shorter one"
            )
        if folder.is_relative_to(input_of_job) or any(
            _finds(input_of_job, path) for path in (out, draft)
        ):
            raise InvalidInput("the output must be outside the input", remedy="give another place")
        if any(parent.suffix == _DRAFT or _mode(parent / MANIFEST) for parent in out.parents):
            raise InvalidInput(
                "the output must be outside the output of another step", remedy="give another place"
            )
        if not stat.S_ISDIR(_mode(folder)):
            remedy = "make it first, where the server may enter"
            raise InvalidInput(
                "the folder of the output does not exist, or is closed to the server", remedy=remedy
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InvalidInput(
                "the folder of the output cannot be written", remedy="give the server the right to"
            )

    def check_places(self, source: str, out: str) -> None:
        """Checks that the input and output of an accepted job are still where they were.

        Raises OtherRoots where they were never in these folders, OutsideRoots where a link leads
        out of them now, and PlaceMoved where it leads elsewhere inside them.
        """
        if is_url(source):
            self._check_url(source, "input")
        else:
            self._check_path(_split_wildcards(Path(source))[0], "input")
        if is_url(out):
            self._check_url(out, "output")
        else:
            self._check_path(draft_path(Path(out)), "output")

    def check_archives(self, real: str) -> None:
        """Checks the files that a resolved input names, before it is listed.

        Raises OutsideRoots where one of them leads outside, and what `open_source` raises.
        """
        if is_url(real):
            return
        from mlcd.images.sources import open_source

        self.check_files(open_source(real, urls=self._web).paths)

    def check_files_of(self, real: str) -> Callable[[Sequence[str]], None]:
        """Returns the check of the files of a resolved input: in a store no link leads outside."""
        return (lambda _: None) if is_url(real) else self.check_files

    def check_files(self, paths: Sequence[str]) -> None:
        """Raises OutsideRoots where a file of an input, or the place of images that one names, is,
        or leads, outside: a wildcard finds links, too.
        """
        for path in paths:
            if not is_url(path):
                self._real_path(Path(path), "input")
            elif not self._stores.holds(path):
                raise OutsideRoots("input")

    def _parse_path(self, location: str, param: Param) -> Path:
        if (
            "\0" in location
            or "://" in location
            or "::" in location
            or not location.startswith("/")
        ):
            raise BadRequest(f"{param} must be an absolute path", param=param)
        if param == "output" and any(
            unicodedata.category(character) == "Cc" for character in location
        ):
            raise BadRequest("output must not have control characters", param=param)
        path = Path(location)
        if ".." in path.parts or not any(path.is_relative_to(root) for root in self._named):
            raise OutsideRoots(param)
        return path

    def _check_url(self, url: str, param: Param) -> None:
        if not self._stores.holds(url):
            raise OtherRoots(param)

    def _check_path(self, path: Path, param: Param) -> None:
        if not any(path.is_relative_to(root) for root in self._real):
            raise OtherRoots(param)
        if self._real_path(path, param) != path:
            raise PlaceMoved(param)

    def _real_path(self, path: Path, param: Param) -> Path:
        real = Path(os.path.realpath(path))
        is_private = self._private is not None and real.is_relative_to(self._private)
        if is_private or not any(real.is_relative_to(root) for root in self._real):
            raise OutsideRoots(param)
        return real


def _mode(path: Path) -> int:
    """Returns the mode of a file, links followed; 0 where there is none or it cannot be seen, where
    `exists` raises.
    """
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _split_wildcards(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Returns the part without wildcards, and the other parts."""
    parts = path.parts
    if os.path.lexists(path):  # whatever its name looks like
        return path, ()
    first = next(
        (index for index, part in enumerate(parts) if any(c in part for c in _WILDCARDS)),
        len(parts),
    )
    return Path(*parts[:first]), parts[first:]


def _finds(pattern: str, path: Path) -> bool:
    return (
        any(c in pattern for c in _WILDCARDS)
        and re.match(glob_translate(pattern), str(path)) is not None
    )


def _readable(files: Iterable[str]) -> Iterator[str]:
    """Yields the files that can be opened and are not empty."""
    for path in files:
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - names need not be valid UTF-8
                continue
            with open(path, "rb") as file:  # noqa: PTH123 - as above
                if file.read(1):
                    yield path
        except OSError:
            continue


def _walk(folder: Path) -> Iterator[str]:
    """Yields the files that count as images."""
    for parent, _, names in os.walk(folder):
        below = Path(parent).relative_to(folder)
        # Names need not be valid UTF-8, as above.
        yield from (os.path.join(parent, name) for name in names if is_candidate(below / name))  # noqa: PTH118
