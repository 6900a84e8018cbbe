"""The folder of an exploration, one per place of pictures and model.

explore.json      `PlaceFacts`
pictures.jsonl    one line per processed picture; the latest line of a picture counts
collections/      the collection of the pictures
embeddings/ centers/ labels/   the artifacts of the last clustering
explore.lock      locked by the process that has the exploration open; contains its URL
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from platformdirs import user_cache_path

from mlcd.artifacts.disk import replacing, sync_path, translate_os_errors
from mlcd.errors import ArtifactInvalid, Conflict, NotFound
from mlcd.locations import is_url

COLLECTION: Final = "photos"
_FACTS: Final = "explore.json"
_LOCK: Final = "explore.lock"
_SCHEMA: Final = 1
_NAME_CHARS: Final = 40
_DIGEST_DIGITS: Final = 10
_REMEDY: Final = "remove the folder, or give another --state"


@dataclass(frozen=True)
class PlaceFacts:
    """The facts of an exploration.

    place: location of the pictures, absolute. model: name of the model, as the user gave it.
    clusters: requested number of clusters, None to choose it. clustered: number of pictures in the
    present clustering. changed: number of pictures added or deleted since.
    """

    place: str
    model: str
    clusters: int | None = None
    clustered: int = 0
    changed: int = 0
    schema: int = field(default=_SCHEMA)


class PlaceState:
    """The folder of one exploration."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, place: str, model: str, folder: Path | None = None) -> Self:
        """Returns the state of a place and a model, at `folder` or in the user's cache."""
        if folder is not None:
            return cls(folder)
        place = absolute(place)
        digest = hashlib.sha256(f"{place}\0{model}".encode()).hexdigest()[:_DIGEST_DIGITS]
        stem = "".join(c if c.isalnum() else "-" for c in Path(place).name)[:_NAME_CHARS]
        return cls(states_folder() / f"{stem.strip('-') or 'photos'}-{digest}")

    @property
    def embeddings(self) -> Path:
        return self.path / "embeddings"

    @property
    def centers(self) -> Path:
        return self.path / "centers"

    @property
    def labels(self) -> Path:
        return self.path / "labels"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures.jsonl"

    def read_or_create(self, place: str, model: str) -> PlaceFacts:
        """Returns the facts; writes new facts into a new folder.

        Raises Conflict if the folder belongs to other pictures or another model.
        """
        new_facts = PlaceFacts(absolute(place), model)
        if (facts := self.read()) is None:
            self.write(new_facts)
            return new_facts
        if (facts.place, facts.model) != (new_facts.place, new_facts.model):
            raise Conflict(
                f"{self.path} holds the exploration of {facts.place} by {facts.model}",
                remedy="give another --state",
            )
        return facts

    def read(self) -> PlaceFacts | None:
        """Returns the facts, None in a new folder. Raises ArtifactInvalid for a damaged file."""
        try:
            fields: dict[str, Any] = json.loads((self.path / _FACTS).read_text(encoding="utf-8"))
            return PlaceFacts(**fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ArtifactInvalid(f"{self.path / _FACTS} cannot be read", remedy=_REMEDY) from error

    def write(self, facts: PlaceFacts) -> None:
        with translate_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / _FACTS) as temporary:
                temporary.write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")
            sync_path(self.path)

    def update(self, facts: PlaceFacts, **changes: Any) -> PlaceFacts:
        """Writes and returns the facts with changed fields."""
        changed = replace(facts, **changes)
        if changed != facts:
            self.write(changed)
        return changed

    def remove_clustering(self) -> None:
        """Removes the artifacts of the last clustering, even unfinished; keeps the collection."""
        for artifact in (self.labels, self.centers, self.embeddings):
            for path in (artifact, artifact.with_name(f"{artifact.name}.partial")):
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator["PlaceLock"]:
        """Locks the exploration for this process. Raises AlreadyOpen if another process has it."""
        with translate_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AlreadyOpen(self.path, os.read(descriptor, 4096).decode()) from error
            os.ftruncate(descriptor, 0)
            yield PlaceLock(descriptor)
        finally:
            os.close(descriptor)


class AlreadyOpen(Conflict):
    """Another process has the exploration open. url: URL of its page, empty while it starts."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(
            f"another process explores {path}{f' at {url}' if url else ''}", remedy="stop it first"
        )
        self.url = url


@dataclass(frozen=True)
class PlaceLock:
    """The lock on an exploration."""

    descriptor: int

    def write_url(self, url: str) -> None:
        """Writes the URL of the page, for other processes."""
        os.pwrite(self.descriptor, url.encode(), 0)


def absolute(place: str) -> str:
    """Returns the location of pictures, independent of the working directory."""
    return place if is_url(place) else str(Path(place).expanduser().absolute())


def states_folder() -> Path:
    return user_cache_path("mlcd") / "explore"


def list_states() -> list[tuple[PlaceState, PlaceFacts]]:
    """Returns every exploration in the user's cache, except damaged ones."""
    states = []
    for path in sorted(states_folder().glob(f"*/{_FACTS}")):
        state = PlaceState(path.parent)
        try:
            if (facts := state.read()) is not None:
                states.append((state, facts))
        except ArtifactInvalid:
            continue
    return states


def forget(place: str, folder: Path | None = None) -> list[Path]:
    """Removes every exploration of a place, and returns the removed folders.

    Raises NotFound without any, AlreadyOpen if one is open.
    """
    place = absolute(place)
    if folder is not None:
        facts = PlaceState(folder).read()
        states = [PlaceState(folder)] if facts is not None and facts.place == place else []
    else:
        states = [state for state, facts in list_states() if facts.place == place]
    if not states:
        raise NotFound(f"{place} was never explored", remedy="mlcd explore --list shows the places")
    for state in states:
        with state.lock():
            shutil.rmtree(state.path)
    return [state.path for state in states]
