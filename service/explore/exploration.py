"""The making of one page of photographs: a thread takes the pictures of a place into a collection,
then clusters and names them, each visible as soon as it is there.

What is done stays done: the collection and the list of pictures are durable after every few
pictures, and each artifact is published whole. After a kill the next start goes on.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import MANIFEST, open_artifact
from mlcd.collections.item import Item, check_new_id, encode_metadata
from mlcd.collections.port import CollectionPort
from mlcd.cores import available_cores
from mlcd.encoders.encoder import Encoder
from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.images.entries import Entries
from mlcd.images.prefetch import thumbnails_all
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.parts.encoded import check_outside, encode_entries
from mlcd.pipelines.embeddings_of_items import write_embeddings
from mlcd.types import SampleKey
from service.explore.pictures import Picture, Pictures, Stamp, stamps_of
from service.explore.progress import ProgressBoard
from service.explore.state import COLLECTION, Facts, State
from service.explore.steps import Steps, Stopped

_log = logging.getLogger("mlcd.explore")

_FIRST_BLOCK: Final = 16  # pictures until something is to be seen
_BLOCK: Final = 128  # pictures of one transaction, which is what a kill loses
_NEWEST: Final = 128  # pictures that the page is told of while others are looked at
_FEW: Final = 40  # pictures, of which too few could be held out for a choice
_PICTURES_A_CLUSTER: Final = 8  # of few
_MOST_COMPARED: Final = 30_000  # pictures; clustering more several times takes minutes
_MOST_CLUSTERS: Final = 2000
_LADDER: Final = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # times the root of the number of pictures
_MAY_CHANGE: Final = 0.2  # share of pictures that may come or go until all are clustered anew
_WORDS: Final = "imagenet"
_TEMPLATES: Final = "plain"  # one prompt a word: the first name within a minute counts more


@dataclass(frozen=True)
class Parts:
    """What an exploration works with, all of the served model.

    take_centers: serves the centers at a path from now on. has_texts: the model reads words.
    """

    encoder: Encoder
    collection: CollectionPort
    take_centers: Callable[[Path], None]
    has_texts: bool
    thumbnail_side: int


class Exploration:
    """The exploration of one place, made by a thread of its own."""

    def __init__(self, state: State, facts: Facts, parts: Parts) -> None:
        self.state, self._facts, self._parts = state, facts, parts
        self.board = ProgressBoard()
        self._steps = Steps()
        self._wanted = threading.Event()
        self._asked: int | None = None
        self._ended = threading.Event()
        self._pictures = Pictures(state.pictures)
        self._source: Source | None = None
        self._thread = threading.Thread(target=self._run, name="explore", daemon=True)

    @property
    def place(self) -> str:
        return self._facts.place

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the work at the next picture, and the running command; call it from any thread."""
        self._steps.stop()
        self._wanted.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def cluster_again(self, clusters: int | None) -> None:
        """Asks for another number of clusters; None chooses one. The latest wish counts.

        Raises InvalidInput for more clusters than pictures.
        """
        num = len(self._parts.collection)
        if clusters is not None and not 1 <= clusters <= max(num, 1):
            raise InvalidInput(f"clusters must be between 1 and {num}, got {clusters}")
        self._asked = clusters
        self._wanted.set()

    def skipped(self, most: int) -> list[tuple[SampleKey, Picture]]:
        """Returns the first files that cannot be used."""
        return self._pictures.skipped()[:most]

    def read(self, key: SampleKey) -> bytes:
        """Returns the file of a picture. Raises NotFound, ImageRejected where it cannot be read."""
        source = self._source
        if key not in self._pictures.by_key or source is None:
            raise NotFound("there is no such picture")
        at = source.entries.find(pa.chunked_array([pa.array([key], pa.large_string())]))
        if at[0] < 0:
            raise NotFound("there is no such picture")
        return source.read(source.entries[int(at[0])])

    def commands(self) -> list[str]:
        """Returns the commands that make the same, one by one."""
        place, state, model = self.place, self.state, self._facts.model
        wanted = self.board.now.clusters or self._facts.clusters or "K"
        commands = [
            f"mlcd embed {place} {state.embeddings} --model {model}",
            f"mlcd cluster {state.embeddings} {state.centers} --clusters {wanted} --hold-out 0",
            f"mlcd label {state.embeddings} {state.labels} --centers {state.centers}",
            f"mlcd index {state.embeddings} {state.path / 'collections' / COLLECTION}"
            f" --thumbnails {place}",
            f"mlcd serve --model {model} --centers {state.centers} --state {state.path}",
        ]
        if self._parts.has_texts:
            commands.insert(2, f"mlcd name {state.centers} --words {_WORDS} --model {model}")
        return commands

    def make(self) -> None:
        """Makes everything in the calling thread, once. Raises what is wrong with the input."""
        has_centers = self._show_centers()
        self._take_in()
        stale = self._facts.changed > _MAY_CHANGE * self._facts.clustered
        if not has_centers or stale:
            self._cluster()
        self._name_and_label()
        self.board.begin("done")

    def _run(self) -> None:
        try:
            self._guarded(self.make)
            while True:
                self._wanted.wait()
                self._wanted.clear()
                self._steps.check()
                self._guarded(self._make_again)
        except Stopped:
            pass
        finally:
            self._ended.set()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Does work; an error is shown in the page, and the rest is served."""
        try:
            work()
        except MlcdError as error:
            _log.warning("the exploration stopped: %s", error)
            self.board.begin("failed")
            self.board.show(error=str(error))

    def _make_again(self) -> None:
        self._facts = self.state.update(self._facts, clusters=self._asked)
        self._cluster()
        self._name_and_label()
        self.board.begin("done")

    def _show_centers(self) -> bool:
        if not (self.state.centers / MANIFEST).is_file():
            return False
        centers = Centers.read(open_artifact(self.state.centers, "centers"))
        self._parts.take_centers(self.state.centers)
        self.board.show(clusters=len(centers.vectors))
        return True

    def _take_in(self) -> None:
        """Brings the collection to what the place holds now."""
        self.board.begin("list")
        check_outside(self.place, self.state.path)
        self._source = source = open_source(self.place)
        source.check_not_empty()
        entries, stamps = source.entries, stamps_of(source, source.entries)
        stamp_of = dict(zip(entries.keys(), stamps, strict=True))
        collection = self._parts.collection
        held = {item.id for block in collection.items() for item in block}
        gone = [key for key in {*held, *self._pictures.by_key} if key not in stamp_of]
        collection.delete_all([key for key in gone if key in held])
        self._pictures.forget(gone)
        waiting = [at for at, key in enumerate(entries.keys()) if self._is_new(key, stamp_of, held)]
        self.board.show(pictures=len(collection), skipped=len(self._pictures.skipped()))
        self.board.begin("embed", len(waiting))
        selected = entries.select(np.array(waiting, np.int64))
        done = 0
        with source.ahead(selected):
            for block in _blocks(selected):
                self._take_block(block, stamp_of)
                done += len(block)
                self.board.advance(done)
                self.board.show(pictures=len(collection), skipped=len(self._pictures.skipped()))
        changed = len(gone) + done
        if changed:
            self._facts = self.state.update(self._facts, changed=self._facts.changed + changed)
        if not len(collection):
            key, picture = self._pictures.skipped()[0]
            raise InvalidInput(
                f"none of the {len(entries)} files in {self.place} can be used",
                remedy=f"the first: {key}: {picture.detail}",
            )

    def _is_new(self, key: SampleKey, stamp_of: dict[SampleKey, Stamp], held: set[str]) -> bool:
        known = self._pictures.by_key.get(key)
        if known is None or known.stamp != stamp_of[key]:
            return True
        return known.reason is None and key not in held

    def _take_block(self, entries: Entries, stamp_of: dict[SampleKey, Stamp]) -> None:
        """Embeds some pictures and adds them to the collection; then they are durable."""

        def on_done(*_: int) -> None:
            self._steps.check()

        threads = available_cores()
        part = encode_entries(
            self._source, entries, self._parts.encoder, num_threads=threads, on_done=on_done
        )
        pictures = {
            error["key"]: Picture(stamp_of[error["key"]], "", error["reason"], error["detail"])
            for error in part.errors
        }
        positions = self._source.entries.find(
            pa.chunked_array([pa.array([e.key for e in part.entries], pa.large_string())])
        )
        usable = self._source.entries.select(positions.astype(np.int64))
        made = thumbnails_all(
            self._source, usable, side=self._parts.thumbnail_side, num_threads=threads
        )
        items = []
        for (entry, picture), row, sha256 in zip(
            made, part.embeddings, part.image_sha256, strict=True
        ):
            metadata = {"class_name": entry.class_name} if entry.class_name else {}
            try:
                check_new_id(entry.key)
                encode_metadata(entry.key, metadata)
            except InvalidInput as error:
                pictures[entry.key] = Picture(stamp_of[entry.key], "", "unusable-name", str(error))
                continue
            items.append(Item(entry.key, row, metadata, picture))
            pictures[entry.key] = Picture(stamp_of[entry.key], sha256.hex())
        if items:
            self._parts.collection.add(items)
            newest = [(item.id, item.thumbnail and item.thumbnail.version) for item in items]
            self.board.show(newest=tuple(newest[-_NEWEST:]))
        # a picture that is not usable any more must not stay
        unusable = [error["key"] for error in part.errors]
        if unusable:
            self._parts.collection.delete_all(unusable)
        self._pictures.add(pictures)

    def _cluster(self) -> None:
        self.board.begin("cluster")
        state, pictures = self.state, self._pictures
        state.remove_clustering()
        write_embeddings(
            self._source,
            self._parts.collection,
            self._parts.encoder,
            state.embeddings,
            image_sha256={
                key: bytes.fromhex(picture.sha256)
                for key, picture in pictures.by_key.items()
                if picture.reason is None
            },
            errors=[
                {"key": key, "reason": str(picture.reason), "detail": str(picture.detail)}
                for key, picture in pictures.skipped()
            ],
        )
        num = len(self._parts.collection)
        numbers = self._numbers_of_clusters(num)
        how = ["--clusters"] if len(numbers) == 1 else ["--choose-k"]
        named = [] if self._parts.has_texts else ["--names"]
        self._steps.run(
            [
                "cluster",
                str(state.embeddings),
                str(state.centers),
                *how,
                ",".join(map(str, numbers)),
                "--hold-out",
                "0",
                *named,
            ],
            self._report,
        )
        self.board.show(considered=tuple(numbers) if len(numbers) > 1 else ())
        self._facts = state.update(self._facts, clustered=num, changed=0)
        self._show_centers()

    def _numbers_of_clusters(self, num: int) -> list[int]:
        """Returns the number of clusters, or those to choose from."""
        distinct = len({row.tobytes() for row in self._rows()})
        if self._facts.clusters is not None:
            return [min(self._facts.clusters, distinct)]
        if num < _FEW:
            return [max(1, min(num // _PICTURES_A_CLUSTER, distinct))]
        root = math.sqrt(num)
        if num > _MOST_COMPARED:
            return [min(round(2 * root), _MOST_CLUSTERS, distinct)]
        return sorted({max(2, min(round(root * each), distinct // 2)) for each in _LADDER})

    def _rows(self) -> Iterator[np.ndarray[Any, Any]]:
        for block in self._parts.collection.items():
            for item in block:
                yield item.embedding

    def _report(self, event: dict[str, Any]) -> None:
        if "done" in event and "stage" in event:
            total = event.get("total")
            self.board.show(total=total)
            self.board.advance(int(event["done"]))

    def _name_and_label(self) -> None:
        """Names the centers, and labels the pictures that were clustered, where that is missing."""
        state = self.state
        if self._parts.has_texts and not (state.centers / "names").is_dir():
            self.board.begin("name")
            words = ["--words", _WORDS, "--model", self._facts.model, "--templates", _TEMPLATES]
            self._steps.run(["name", str(state.centers), *words], self._report)
        if not (state.labels / MANIFEST).is_file():
            self.board.begin("label")
            self._steps.run(
                [
                    "label",
                    str(state.embeddings),
                    str(state.labels),
                    "--centers",
                    str(state.centers),
                ],
                self._report,
            )


def _blocks(entries: Entries) -> Iterator[Entries]:
    """Yields the pictures in blocks, a small one first."""
    start, size = 0, _FIRST_BLOCK
    while start < len(entries):
        yield entries[start : start + size]
        start, size = start + size, _BLOCK
