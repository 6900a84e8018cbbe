"""The nearest centers of embeddings, exact or approximate; approximation is audited at start."""

import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.approximate import (
    AUDITED_ROWS,
    MIN_AUDITED_ROWS,
    ApproximateScan,
    audit,
    divide,
    fewest_probes,
)
from mlcd.clustering.members import ORDINARY
from mlcd.clustering.nearest import CenterScan
from mlcd.collections.clusters import LEAST_ORDINARY
from mlcd.collections.port import CollectionPort
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.randomness import hash_counters
from mlcd.service.inference.center_names import CenterNames
from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.stored_names import StoredNames
from mlcd.types import Embeddings, Neighbors, least_product, unit_rows

_log = logging.getLogger("mlcd.service")

LookupMode = Literal["exact", "approximate"]
_AUDITED_TOP: Final = 8  # the default `top` of /v1/labels
_RECENT: Final = 10_000  # images, the latest of this process


class QueryNovelty:
    """The centers of the latest images that were looked up, and whether each lies beyond the
    distance within which most members of its cluster lie.
    """

    def __init__(self, quantiles: NDArray[np.float32]) -> None:
        """quantiles: [K], the distances, 1 - cosine."""
        self._quantiles = quantiles
        self._centers = np.full(_RECENT, -1, np.int32)
        self._beyond = np.zeros(_RECENT, np.bool_)
        self._seen = 0
        self._changing = threading.Lock()

    def add(self, centers: NDArray[np.integer], similarities: NDArray[np.float32]) -> int:
        """Adds images by their nearest centers, and returns how many lie beyond."""
        beyond = 1 - similarities > self._quantiles[centers]
        latest = slice(-_RECENT, None)
        centers, recent = centers[latest], beyond[latest]
        with self._changing:
            places = (self._seen + np.arange(len(centers))) % _RECENT
            self._centers[places], self._beyond[places] = centers, recent
            self._seen += len(centers)
        return int(beyond.sum())

    def by_center(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns how many of the recent images each center has, and how many of these lie beyond,
        [K] each.
        """
        with self._changing:
            is_used = self._centers >= 0
            centers, beyond = self._centers[is_used], self._beyond[is_used]
        num = len(self._quantiles)
        return np.bincount(centers, minlength=num), np.bincount(centers[beyond], minlength=num)


@dataclass(frozen=True)
class Approximation:
    """The approximate look-up.

    audit: recall, low, high, rows, source, top, cells and probes, as answers show them.
    """

    scan: ApproximateScan
    probes: int
    audit: dict[str, Any]

    @classmethod
    def build(
        cls, centers: Centers, exact: CenterScan, collections: Iterable[CollectionPort]
    ) -> "Approximation":
        """Divides the centers into cells, chooses as few probes as recall allows, and audits them.

        The audit uses other rows than the choice. The rows are those shipped with the centers, else
        indexed ones. Raises ConfigInvalid for too few centers or rows, or where no number of probes
        is enough.
        """
        source, unaligned = _choose_audit_rows(centers, collections)
        rows = centers.align(unaligned)
        top = min(_AUDITED_TOP, len(centers.vectors))
        scan = ApproximateScan(centers.vectors, divide(centers.vectors))
        true = exact.nearest(rows, top).ids
        probes = fewest_probes(scan, rows[::2], true[::2])
        result = audit(scan, rows[1::2], true[1::2], probes)
        summary = {
            "recall": result.recall,
            "low": result.low,
            "high": result.high,
            "rows": result.rows,
            "source": source,
        }
        return cls(scan, probes, {**summary, "top": top, "cells": scan.num_cells, "probes": probes})


class Lookup:
    """The centers, prepared once for look-ups."""

    def __init__(
        self, centers: Centers, artifact: Artifact | None = None, state_dir: Path | None = None
    ) -> None:
        """artifact: that of the centers. state_dir: see `StoredNames`."""
        self.centers = centers
        self._artifact = artifact
        self._stored = None if artifact is None else StoredNames(artifact, state_dir)
        self._renaming = threading.Lock()
        self._read_at = None if self._stored is None else self._stored.versions()
        self.damaged_names: str | None = None
        self.names = CenterNames(centers.names or (None,) * len(centers.vectors), ())
        self._read_names()
        self.recent = None if centers.quantiles is None else QueryNovelty(centers.quantiles)
        # The service never loads torch, and numpy's labels are the same.
        self.scan = CenterScan(centers.vectors, matmul="numpy")
        self.approximation: Approximation | None = None

    def approximate(self, collections: Iterable[CollectionPort]) -> None:
        """Prepares the approximate mode, audited on the centers' own rows or on indexed ones."""
        try:
            self.approximation = Approximation.build(self.centers, self.scan, collections)
        except ConfigInvalid as error:
            remedy = "leave MLCD_APPROXIMATE out: labels are then exact"
            raise ConfigInvalid(error.message, remedy=remedy) from error

    def rename(self, center: int, name: str | None) -> CenterNames:
        """Gives a center a name, durably, and returns the names since. None takes its name away."""
        assert self._stored is not None
        with self._renaming:
            self._take(self.names.since(self._stored.rename(center, name)))
            return self.names

    def follow_names(self) -> None:
        """Reads the names again where another process has changed their files.

        The names stay where one is damaged, and where the centers were removed or replaced, as by
        another clustering of an explored place.
        """
        if self._stored is None or self._stored.versions() == self._read_at:
            return
        if not self._stored.is_in_place():
            return
        with self._renaming, suppress(FileNotFoundError):  # they may be removed meanwhile
            # the file may change again while it is read, and is then read again
            self._read_at = self._stored.versions()
            self._read_names(again=True)

    def _read_names(self, *, again: bool = False) -> None:
        """Reads the names; without those of a damaged file.

        again: leaves the names as they are if a file is damaged.
        """
        if self._stored is None or self._artifact is None:
            return
        read = self._stored.read()
        self.damaged_names = read.damaged
        if again and read.damaged is not None:
            return
        try:
            names = CenterNames.read(self._artifact, read.names)
        except ArtifactInvalid as error:
            _log.error("the evidence for the names of the centers: %s", error)
            self.damaged_names = read.names.evidence
            names = CenterNames(read.names.names, (), read.names.version)
        self._take(names)

    def _take(self, names: CenterNames) -> None:
        self.names = names
        self.centers = replace(self.centers, names=names.names)

    @cached_property
    def ordinary_distances(self) -> NDArray[np.floating] | float | None:
        """Returns the distance, 1 - cosine, within which most images like those that were clustered
        lie from their nearest center: of each center, [K], or of all.

        Without quantiles of its own each center has the 95 % quantile of the rows that ship with
        the centers; the result is None where those are too few.
        """
        if self.centers.quantiles is not None:
            return self.centers.quantiles
        shipped = self.centers.audit_rows
        if shipped is None or len(shipped) < LEAST_ORDINARY:
            return None
        rows = self.centers.align(unit_rows(shipped))
        return float(np.quantile(1 - self.scan.nearest(rows, 1).scores[:, 0], ORDINARY))

    def remember(self, embeddings: Embeddings, neighbors: Neighbors) -> int | None:
        """Counts images among the recent ones, and returns how many lie beyond the quantile of
        their center; None where the centers have none.

        neighbors: what `nearest` returns for these embeddings.
        """
        if self.recent is None or not len(embeddings):
            return None
        ids, scores = neighbors.ids[:, 0].copy(), neighbors.scores[:, 0].copy()
        if (left_out := ids < 0).any():  # by a threshold
            nearest = self.nearest(embeddings[left_out], 1)
            ids[left_out], scores[left_out] = nearest.ids[:, 0], nearest.scores[:, 0]
        return self.recent.add(ids, scores)

    @property
    def modes(self) -> list[LookupMode]:
        return ["exact"] if self.approximation is None else ["exact", "approximate"]

    def nearest(
        self,
        embeddings: Embeddings,
        top: int,
        threshold: float | None = None,
        *,
        mode: LookupMode = "exact",
        engine_labels: EngineLabels | None = None,
    ) -> Neighbors:
        """Finds the `top` nearest centers, or all if fewer, of unit rows from the model.

        engine_labels: those that the engine found already; they do not change the answer.
        """
        rows, top = self.centers.align(embeddings), min(top, len(self.centers.vectors))
        least = None if threshold is None else least_product(threshold)
        return self._nearest(embeddings, rows, top, least, mode, engine_labels).as_cosines()

    def _nearest(
        self,
        embeddings: Embeddings,
        rows: Embeddings,
        top: int,
        least: float | None,
        mode: LookupMode,
        engine_labels: EngineLabels | None,
    ) -> Neighbors:
        """Returns the nearest centers with their products, of at least `least`."""
        if mode == "exact":
            if (
                engine_labels is not None
                and engine_labels.centers == self.centers.digest
                and engine_labels
            ):
                return self._complete_labels(engine_labels, embeddings, rows, top, least)
            return self.scan.nearest(rows, top, least)
        assert self.approximation is not None
        return self.approximation.scan.nearest(rows, top, least, probes=self.approximation.probes)

    def _complete_labels(
        self,
        engine_labels: EngineLabels,
        embeddings: Embeddings,
        rows: Embeddings,
        top: int,
        least: float | None,
    ) -> Neighbors:
        """Returns the labels of the engine, and scans for the other rows."""
        has, ids, exact = engine_labels.of(embeddings, rows, self.centers.vectors, top)
        if least is not None:  # compares the scores before they are rounded
            beyond = exact < least
            ids[beyond], exact[beyond] = -1, -np.inf
        scores = exact.astype(np.float32)
        if not has.all():
            scanned = self.scan.nearest(rows[~has], top, least)
            ids[~has], scores[~has] = scanned.ids, scanned.scores
        return Neighbors(ids.astype(np.int32), scores)


def _choose_audit_rows(
    centers: Centers, collections: Iterable[CollectionPort]
) -> tuple[str, Embeddings]:
    """Returns the source of the rows to audit, and the rows.

    The rows are unit [n, D] as the model gives them, with n of at least MIN_AUDITED_ROWS.
    """
    shipped = centers.audit_rows
    if shipped is not None and len(shipped) >= MIN_AUDITED_ROWS:
        return "centers", unit_rows(shipped)
    return "collections", _sample(collections, AUDITED_ROWS)


def _sample(collections: Iterable[CollectionPort], num: int) -> Embeddings:
    """Returns at most `num` indexed rows, [n, D], drawn by the hash of their positions."""
    opened = [collection.rows() for collection in collections]
    positions = [(take, row) for ids, take in opened for row in range(len(ids))]
    if len(positions) < MIN_AUDITED_ROWS:
        raise ConfigInvalid(
            f"approximate labels are audited on {MIN_AUDITED_ROWS} rows or more: these centers ship"
            " none, as `mlcd cluster` writes them, and there are"
            f" {len(positions)} indexed images (--state)"
        )
    chosen = np.argsort(hash_counters(np.arange(len(positions))), kind="stable")[:num]
    return np.concatenate([take(np.array([row])) for take, row in (positions[i] for i in chosen)])
