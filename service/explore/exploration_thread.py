"""Explores a place of pictures on a thread: adds them to a collection, then groups and names them,
with each result visible immediately.

Finished work survives a kill, and the next start continues: the collection and the list of pictures
are durable after every block of pictures, and artifacts are published atomically.
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
from mlcd.pipelines.stored_rows import StoredRows
from mlcd.service.explore.group_names import restore_names, save_names
from mlcd.service.explore.intake import PictureIntake
from mlcd.service.explore.place_state import COLLECTION, PlaceFacts, PlaceState
from mlcd.service.explore.progress_board import ProgressBoard
from mlcd.service.explore.seen_pictures import SeenPicture, SeenPictures
from mlcd.service.explore.steps import ExplorationSteps, ExplorationStopped
from mlcd.types import SampleKey

_log = logging.getLogger("mlcd.explore")

# Fewer pictures are too few to hold some out, so the number of clusters is not compared.
_MIN_COMPARED: Final = 40
_PICTURES_PER_CLUSTER: Final = 8  # with fewer than _MIN_COMPARED pictures
# the fewest pictures per cluster in a comparison, which holds out a fifth of them
_MIN_PICTURES_PER_CLUSTER: Final = 5
_MAX_COMPARED: Final = 30_000  # pictures; comparing clusterings of more takes minutes
_MAX_CLUSTERS: Final = 2000  # with more than _MAX_COMPARED pictures
_FACTORS: Final = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the square root of the number of pictures
_MAX_CHANGE: Final = 0.2  # fraction of changed pictures after which all are clustered again
_WORDS: Final = "imagenet"
_TEMPLATES: Final = "plain"  # one prompt per word, for names within a minute


@dataclass(frozen=True)
class ExplorationParts:
    """The parts of the server that an exploration uses.

    stored_rows: the rows of the pictures where the model is an embeddings artifact.
    serve_centers: serves the centers at a path from now on. read_given_names: returns the names
    that users gave to the centers at a path, by id. set_name: names a center at a path. has_texts:
    whether the model has a text tower.
    """

    encoder: Encoder
    stored_rows: StoredRows | None
    collection: CollectionPort
    serve_centers: Callable[[Path], None]
    read_given_names: Callable[[Path], Mapping[int, str]]
    set_name: Callable[[Path, int, str], None]
    has_texts: bool
    thumbnail_side: int


class Exploration:
    """The exploration of one place, on a separate thread."""

    def __init__(self, state: PlaceState, facts: PlaceFacts, parts: ExplorationParts) -> None:
        self.state, self._facts, self._parts = state, facts, parts
        self.board = ProgressBoard()
        self._pictures = SeenPictures(state.pictures)
        self._source: Source | None = None
        self._steps = ExplorationSteps()
        self._recluster = threading.Event()
        self._requested_clusters: int | None = None
        self._thread = threading.Thread(target=self._run, name="explore", daemon=True)

    @property
    def place(self) -> str:
        return self._facts.place

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the work after the current picture, and the running command. Any thread may call."""
        self._steps.stop()
        self._recluster.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def cluster_again(self, clusters: int | None) -> None:
        """Requests another number of clusters, or None to choose it; the latest request counts.

        Raises InvalidInput for more clusters than pictures.
        """
        num = len(self._parts.collection)
        if clusters is not None and not 1 <= clusters <= num:
            raise InvalidInput(f"clusters must be between 1 and {num}, got {clusters}")
        self._requested_clusters = clusters
        if self.board.now.stage in (
            "done",
            "failed",
        ):  # clients must not see the old groups as done
            self.board.begin("cluster")
        self._recluster.set()

    def list_skipped(self, limit: int) -> list[tuple[SampleKey, SeenPicture]]:
        """Returns the first `limit` files that cannot be used."""
        return self._pictures.list_skipped()[:limit]

    def read(self, key: SampleKey) -> bytes:
        """Returns the bytes of a picture. Raises NotFound, and ImageRejected if unreadable."""
        if self._source is not None and key in self._pictures.by_key:
            entries = self._source.entries
            index = entries.find(pa.chunked_array([pa.array([key], pa.large_string())]))[0]
            if index >= 0:
                return self._source.read(entries[int(index)])
        raise NotFound("the picture does not exist")

    def commands(self) -> list[str]:
        """Returns the commands that would give the same result step by step."""
        place, state, model = self.place, self.state, self._facts.model
        embeddings, centers = str(state.embeddings), str(state.centers)
        if self._parts.stored_rows is not None:
            embeddings = model
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
        if self._parts.stored_rows is not None:
            del commands[0]
        return [shlex.join(["mlcd", *command]) for command in commands]

    def _run(self) -> None:
        try:
            self._run_reporting_errors(self._explore)
            while True:
                self._recluster.wait()
                self._recluster.clear()
                self._steps.check()
                self._run_reporting_errors(self._explore_again)
        except ExplorationStopped:
            pass

    def _run_reporting_errors(self, work: Callable[[], None]) -> None:
        """Runs work; shows an error in the page, where earlier results stay."""
        try:
            work()
        except MlcdError as error:
            _log.warning("the exploration stopped: %s", error)
            self._fail(str(error))
        except ExplorationStopped:
            raise
        except Exception as error:  # noqa: BLE001 - otherwise the page would not show the error
            _log.exception("the exploration stopped")
            self._fail(f"an internal error ({type(error).__name__}): see the log")

    def _fail(self, text: str) -> None:
        self.board.begin("failed")
        self.board.show(error=text)

    def _explore(self) -> None:
        has_centers = self._show_centers()
        self.board.show(pictures=len(self._parts.collection))
        self.board.begin("list")
        check_outside(self.place, self.state.path)
        source = open_source(self.place)
        source.check_not_empty()
        self._source = source
        self._take_in(source)
        if not has_centers or self._facts.changed > _MAX_CHANGE * self._facts.clustered:
            self._cluster(source)
        self._label_and_name()
        self.board.begin("done")

    def _explore_again(self) -> None:
        if self._source is None:
            raise NotFound(f"the pictures of {self.place} cannot be listed")
        self._facts = self.state.update(self._facts, clusters=self._requested_clusters)
        self._cluster(self._source)
        self._label_and_name()
        self.board.begin("done")

    def _take_in(self, source: Source) -> None:
        parts = self._parts
        changed = PictureIntake(
            source,
            parts.collection,
            parts.encoder,
            parts.stored_rows,
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
        """Serves the centers if they exist; returns whether they do."""
        if not (self.state.centers / MANIFEST).is_file():
            return False
        centers = Centers.read(open_artifact(self.state.centers, "centers"))
        self._parts.serve_centers(self.state.centers)
        self.board.show(clusters=len(centers.vectors))
        return True

    def _cluster(self, source: Source) -> None:
        self.board.begin("cluster")
        state, parts, pictures = self.state, self._parts, self._pictures
        if (state.centers / MANIFEST).is_file():
            save_names(state, parts.read_given_names(state.centers))
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
        cluster_counts = self._choose_cluster_counts()
        option = "--clusters" if len(cluster_counts) == 1 else "--choose-k"
        command = ["cluster", str(state.embeddings), str(state.centers)]
        command += [option, ",".join(map(str, cluster_counts)), "--hold-out", "0"]
        if not parts.has_texts:
            command.append("--names")
        self._steps.run(command, self._report)
        self.board.show(considered=tuple(cluster_counts) if len(cluster_counts) > 1 else ())
        self._facts = state.update(self._facts, clustered=len(parts.collection), changed=0)

    def _choose_cluster_counts(self) -> list[int]:
        """Returns one number of clusters, or several numbers to compare."""
        items = (item for block in self._parts.collection.items() for item in block)
        distinct = len({item.embedding.tobytes() for item in items})
        if self._facts.clusters is not None:
            return [min(self._facts.clusters, distinct)]
        if distinct < _MIN_COMPARED:
            return [max(1, distinct // _PICTURES_PER_CLUSTER)]
        root = math.sqrt(distinct)
        if distinct > _MAX_COMPARED:
            return [min(round(2 * root), _MAX_CLUSTERS)]
        max_clusters = distinct // _MIN_PICTURES_PER_CLUSTER
        return sorted({max(2, min(round(root * factor), max_clusters)) for factor in _FACTORS})

    def _report(self, event: dict[str, Any]) -> None:
        if "stage" in event:
            self.board.show(total=event["total"])
            self.board.advance(int(event["done"]))

    def _label_and_name(self) -> None:
        """Labels the clustered pictures and names the centers, unless that is done.

        Serves new centers with the names that users gave; names from words follow later.
        """
        state = self.state
        is_new = not (state.labels / MANIFEST).is_file()
        if is_new:
            self.board.begin("label")
            rows = [str(state.embeddings), str(state.labels)]
            self._steps.run(["label", *rows, "--centers", str(state.centers)], self._report)
        restore_names(state, partial(self._parts.set_name, state.centers))
        if is_new:
            self._show_centers()
        if self._parts.has_texts and not (state.centers / "names").is_dir():
            self.board.begin("name")
            words = ["--words", _WORDS, "--templates", _TEMPLATES, "--model", self._facts.model]
            self._steps.run(["name", str(state.centers), *words], self._report)
