"""The making of one page of photographs: a thread takes the pictures of a place into a collection,
then groups and names them, each visible as soon as it is there.

What is done stays done: the collection and the list of pictures are durable after every few
pictures, and each artifact is published whole. After a kill the next start goes on.
"""

import logging
import math
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import MANIFEST, open_artifact
from mlcd.collections.port import CollectionPort
from mlcd.encoders.encoder import Encoder
from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.pipelines.embeddings_of_items import write_embeddings
from mlcd.pipelines.encoded import check_outside
from mlcd.service.explore.group_names import restore_names, save_names
from mlcd.service.explore.intake import PictureIntake
from mlcd.service.explore.place_state import COLLECTION, PlaceFacts, PlaceState
from mlcd.service.explore.progress_board import ProgressBoard
from mlcd.service.explore.seen_pictures import SeenPicture, SeenPictures
from mlcd.service.explore.steps import ExplorationSteps, ExplorationStopped
from mlcd.types import SampleKey

_log = logging.getLogger("mlcd.explore")

_FEW: Final = 40  # pictures, of which too few could be held out for a choice
_PICTURES_A_CLUSTER: Final = 8  # of few
_LEAST_TO_COMPARE: Final = 5  # pictures a cluster; a fifth of them is held out to compare
_MOST_COMPARED: Final = 30_000  # pictures; clustering more several times takes minutes
_MOST_CLUSTERS: Final = 2000
_LADDER: Final = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # times the root of the number of pictures
_MAY_CHANGE: Final = 0.2  # share of pictures that may come or go until all are clustered anew
_WORDS: Final = "imagenet"
_TEMPLATES: Final = "plain"  # one prompt a word: the first name within a minute counts more


@dataclass(frozen=True)
class ExplorationParts:
    """The parts that an exploration works with, all of the served model.

    take_centers: serves the centers at a path from now on. names_by_hand: the names that people
    gave to the centers at a path, by id. give_name: gives one of them a name. has_texts: the model
    reads words.
    """

    encoder: Encoder
    collection: CollectionPort
    take_centers: Callable[[Path], None]
    names_by_hand: Callable[[Path], Mapping[int, str]]
    give_name: Callable[[Path, int, str], None]
    has_texts: bool
    thumbnail_side: int


class Exploration:
    """The exploration of one place, made by a thread of its own."""

    def __init__(self, state: PlaceState, facts: PlaceFacts, parts: ExplorationParts) -> None:
        self.state, self._facts, self._parts = state, facts, parts
        self.board = ProgressBoard()
        self._pictures = SeenPictures(state.pictures)
        self._source: Source | None = None
        self._steps = ExplorationSteps()
        self._wanted = threading.Event()
        self._asked: int | None = None
        self._thread = threading.Thread(target=self._run, name="explore", daemon=True)

    @property
    def place(self) -> str:
        return self._facts.place

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the work after the present picture, and the running command; from any thread."""
        self._steps.stop()
        self._wanted.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def cluster_again(self, clusters: int | None) -> None:
        """Asks for another number of clusters; None has it chosen. The latest wish counts.

        Raises InvalidInput for more clusters than pictures.
        """
        num = len(self._parts.collection)
        if clusters is not None and not 1 <= clusters <= num:
            raise InvalidInput(f"clusters must be between 1 and {num}, got {clusters}")
        self._asked = clusters
        if self.board.now.stage in ("done", "failed"):  # who asks next must not find the old groups
            self.board.begin("cluster")
        self._wanted.set()

    def list_skipped(self, most: int) -> list[tuple[SampleKey, SeenPicture]]:
        """Returns the first files that cannot be used."""
        return self._pictures.list_skipped()[:most]

    def read(self, key: SampleKey) -> bytes:
        """Returns the file of a picture. Raises NotFound, ImageRejected where it cannot be read."""
        if self._source is not None and key in self._pictures.by_key:
            entries = self._source.entries
            index = entries.find(pa.chunked_array([pa.array([key], pa.large_string())]))[0]
            if index >= 0:
                return self._source.read(entries[int(index)])
        raise NotFound("the picture does not exist")

    def commands(self) -> list[str]:
        """Returns the commands that make the same, one by one."""
        place, state, model = self.place, self.state, self._facts.model
        embeddings, centers = str(state.embeddings), str(state.centers)
        collection = str(state.path / "collections" / COLLECTION)
        num_clusters = str(self.board.now.clusters or self._facts.clusters or "K")
        commands = [
            ["embed", place, embeddings, "--model", model],
            ["cluster", embeddings, centers, "--clusters", num_clusters, "--hold-out", "0"],
            ["name", centers, "--words", _WORDS, "--model", model],
            ["label", embeddings, str(state.labels), "--centers", centers],
            ["index", embeddings, collection],
            ["serve", "--model", model, "--centers", centers, "--state", str(state.path)],
        ]
        if not self._parts.has_texts:
            del commands[2]
        return [shlex.join(["mlcd", *command]) for command in commands]

    def _run(self) -> None:
        try:
            self._show_failure_of(self._make)
            while True:
                self._wanted.wait()
                self._wanted.clear()
                self._steps.check()
                self._show_failure_of(self._make_again)
        except ExplorationStopped:
            pass

    def _show_failure_of(self, work: Callable[[], None]) -> None:
        """Does work; an error is shown in the page, and what was made is served."""
        try:
            work()
        except MlcdError as error:
            _log.warning("the exploration stopped: %s", error)
            self._fail(str(error))
        except ExplorationStopped:
            raise
        except Exception as error:  # noqa: BLE001 - the thread would end without a word in the page
            _log.exception("the exploration stopped")
            self._fail(f"an error of mlcd itself ({type(error).__name__}): the log has it")

    def _fail(self, text: str) -> None:
        self.board.begin("failed")
        self.board.show(error=text)

    def _make(self) -> None:
        has_centers = self._show_centers()
        self.board.show(pictures=len(self._parts.collection))
        self.board.begin("list")
        check_outside(self.place, self.state.path)
        source = open_source(self.place)
        source.check_not_empty()
        self._source = source
        self._take_in(source)
        if not has_centers or self._facts.changed > _MAY_CHANGE * self._facts.clustered:
            self._cluster(source)
        self._label_and_name()
        self.board.begin("done")

    def _make_again(self) -> None:
        if self._source is None:
            raise NotFound(f"the pictures of {self.place} cannot be listed")
        self._facts = self.state.update(self._facts, clusters=self._asked)
        self._cluster(self._source)
        self._label_and_name()
        self.board.begin("done")

    def _take_in(self, source: Source) -> None:
        parts = self._parts
        changed = PictureIntake(
            source,
            parts.collection,
            parts.encoder,
            self._pictures,
            self.board,
            self._steps.check,
            parts.thumbnail_side,
        ).run()
        if changed:
            self._facts = self.state.update(self._facts, changed=self._facts.changed + changed)
        if not len(parts.collection):
            key, picture = self._pictures.list_skipped()[0]
            raise InvalidInput(
                f"none of the {len(source.entries)} files in {self.place} can be used",
                remedy=f"the first: {key}: {picture.detail}",
            )

    def _show_centers(self) -> bool:
        """Serves the centers, where there are any."""
        if not (self.state.centers / MANIFEST).is_file():
            return False
        centers = Centers.read(open_artifact(self.state.centers, "centers"))
        self._parts.take_centers(self.state.centers)
        self.board.show(clusters=len(centers.vectors))
        return True

    def _cluster(self, source: Source) -> None:
        self.board.begin("cluster")
        state, parts, pictures = self.state, self._parts, self._pictures
        if (state.centers / MANIFEST).is_file():
            save_names(state, parts.names_by_hand(state.centers))
        state.remove_clustering()
        write_embeddings(
            source,
            parts.collection,
            parts.encoder,
            state.embeddings,
            image_sha256={
                key: bytes.fromhex(picture.sha256)
                for key, picture in pictures.by_key.items()
                if picture.reason is None
            },
            errors=[
                {"key": key, "reason": str(picture.reason), "detail": str(picture.detail)}
                for key, picture in pictures.list_skipped()
            ],
        )
        numbers = self._numbers_of_clusters()
        how = "--clusters" if len(numbers) == 1 else "--choose-k"
        command = ["cluster", str(state.embeddings), str(state.centers)]
        command += [how, ",".join(map(str, numbers)), "--hold-out", "0"]
        if not parts.has_texts:
            command.append("--names")
        self._steps.run(command, self._report)
        self.board.show(considered=tuple(numbers) if len(numbers) > 1 else ())
        self._facts = state.update(self._facts, clustered=len(parts.collection), changed=0)

    def _numbers_of_clusters(self) -> list[int]:
        """Returns the number of clusters, or those to choose from."""
        items = (item for block in self._parts.collection.items() for item in block)
        distinct = len({item.embedding.tobytes() for item in items})
        if self._facts.clusters is not None:
            return [min(self._facts.clusters, distinct)]
        if distinct < _FEW:
            return [max(1, distinct // _PICTURES_A_CLUSTER)]
        root = math.sqrt(distinct)
        if distinct > _MOST_COMPARED:
            return [min(round(2 * root), _MOST_CLUSTERS)]
        most = distinct // _LEAST_TO_COMPARE
        return sorted({max(2, min(round(root * factor), most)) for factor in _LADDER})

    def _report(self, event: dict[str, Any]) -> None:
        if "stage" in event:
            self.board.show(total=event["total"])
            self.board.advance(int(event["done"]))

    def _label_and_name(self) -> None:
        """Labels what was clustered and names the centers, where that is missing.

        The new centers are served with the names that people gave; those from words come later.
        """
        state = self.state
        is_new = not (state.labels / MANIFEST).is_file()
        if is_new:
            self.board.begin("label")
            rows = [str(state.embeddings), str(state.labels)]
            self._steps.run(["label", *rows, "--centers", str(state.centers)], self._report)
        restore_names(state, partial(self._parts.give_name, state.centers))
        if is_new:
            self._show_centers()
        if self._parts.has_texts and not (state.centers / "names").is_dir():
            self.board.begin("name")
            words = ["--words", _WORDS, "--templates", _TEMPLATES, "--model", self._facts.model]
            self._steps.run(["name", str(state.centers), *words], self._report)
