"""Finds the nearest centers of embeddings, exactly or approximately (audited at start)."""

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
from mlcd.clustering.members import NOVELTY_QUANTILE
from mlcd.clustering.nearest import CenterScan, as_neighbors
from mlcd.collections.clusters import MIN_ROWS_FOR_NOVELTY
from mlcd.collections.port import CollectionPort
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.randomness import hash_counters
from mlcd.service.inference.center_names import CenterNames
from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.stored_names import StoredNames
from mlcd.types import Embeddings, Neighbors, min_dot_product, unit_rows

_log = logging.getLogger("mlcd.service")

LookupMode = Literal["exact", "approximate"]
_AUDITED_TOP: Final = 8  # the default `top` of /v1/labels
_NUM_RECENT: Final = 10_000  # latest images of this process


class QueryNovelty:
    """Counts, for the latest images that were looked up, how many lie beyond the distance within
    which most members of their cluster lie.
    """

    def __init__(self, quantiles: NDArray[np.float32]) -> None:
        """quantiles: [K], that distance (1 - cosine) of each center."""
        self._quantiles = quantiles
        self._centers = np.full(_NUM_RECENT, -1, np.int32)
        self._beyond = np.zeros(_NUM_RECENT, np.bool_)
        self._num_seen = 0
        self._lock = threading.Lock()

    def add(self, centers: NDArray[np.integer], similarities: NDArray[np.float32]) -> int:
        """Adds images by their nearest centers, and returns how many lie beyond the distance."""
        beyond = 1 - similarities > self._quantiles[centers]
        latest = slice(-_NUM_RECENT, None)
        centers, latest_beyond = centers[latest], beyond[latest]
        with self._lock:
            slots = (self._num_seen + np.arange(len(centers))) % _NUM_RECENT
            self._centers[slots], self._beyond[slots] = centers, latest_beyond
            self._num_seen += len(centers)
        return int(beyond.sum())

    def by_center(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the number of recent images of each center, and how many of them lie beyond the
        distance, [K] each.
        """
        with self._lock:
            is_used = self._centers >= 0
            centers, beyond = self._centers[is_used], self._beyond[is_used]
        num = len(self._quantiles)
        return np.bincount(centers, minlength=num), np.bincount(centers[beyond], minlength=num)


@dataclass(frozen=True)
class Approximation:
    """The approximate look-up.

    audit: recall, low, high, rows, source, top, cells and probes, as shown in responses.
    """

    scan: ApproximateScan
    probes: int
    audit: dict[str, Any]

    @classmethod
    def build(
        cls, centers: Centers, exact: CenterScan, collections: Iterable[CollectionPort]
    ) -> "Approximation":
        """Divides the centers into cells, chooses the lowest number of probes with enough recall,
        and audits the recall on different rows.

        Uses rows that ship with the centers, otherwise indexed rows. Raises ConfigInvalid for too
        few centers or rows, or if no number of probes is enough.
        """
        source, unaligned = _choose_audit_rows(centers, collections)
        rows = centers.align(unaligned)
        top = min(_AUDITED_TOP, len(centers.vectors))
        scan = ApproximateScan(centers.vectors, divide(centers.vectors))
        exact_ids = exact.nearest(rows, top).ids
        probes = fewest_probes(scan, rows[::2], exact_ids[::2])
        result = audit(scan, rows[1::2], exact_ids[1::2], probes)
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
        """artifact: artifact of the centers; without it names are not stored. state_dir: see
        `StoredNames`.
        """
        self.centers = centers
        self._artifact = artifact
        self._stored = None if artifact is None else StoredNames(artifact, state_dir)
        self._renaming = threading.Lock()
        self._read_versions = None if self._stored is None else self._stored.versions()
        self.damaged_names: str | None = None
        self.names = CenterNames(centers.names or (None,) * len(centers.vectors), ())
        self._read_names()
        self.recent = None if centers.quantiles is None else QueryNovelty(centers.quantiles)
        # numpy, because the server must not load torch; the labels are the same.
        self.scan = CenterScan(centers.vectors, matmul="numpy")
        self.approximation: Approximation | None = None

    def approximate(self, collections: Iterable[CollectionPort]) -> None:
        """Prepares the approximate mode; see `Approximation.build`."""
        try:
            self.approximation = Approximation.build(self.centers, self.scan, collections)
        except ConfigInvalid as error:
            remedy = "leave MLCD_APPROXIMATE out, for exact labels"
            raise ConfigInvalid(error.message, remedy=remedy) from error

    def rename(self, center: int, name: str | None) -> CenterNames:
        """Sets a center's name durably, or removes it for None; returns the new names."""
        assert self._stored is not None
        with self._renaming:
            self._set_names(self.names.since(self._stored.rename(center, name)))
            return self.names

    def follow_names(self) -> None:
        """Reads the names again if another process has changed their files.

        Keeps the present names if a file is damaged, or if the centers were removed or replaced, as
        by another clustering of an explored folder.
        """
        if self._stored is None or self._stored.versions() == self._read_versions:
            return
        if not self._stored.is_in_place():
            return
        with self._renaming, suppress(FileNotFoundError):  # the files may be removed meanwhile
            # read before the names, so that a change during the read causes another read
            self._read_versions = self._stored.versions()
            self._read_names(keep_if_damaged=True)

    def _read_names(self, *, keep_if_damaged: bool = False) -> None:
        """Reads the names without a damaged file, or, with keep_if_damaged, keeps them then."""
        if self._stored is None or self._artifact is None:
            return
        read = self._stored.read()
        self.damaged_names = read.damaged
        if keep_if_damaged and read.damaged is not None:
            return
        try:
            names = CenterNames.read(self._artifact, read.names)
        except ArtifactInvalid as error:
            _log.error("the evidence for the names of centers cannot be read: %s", error)
            self.damaged_names = read.names.evidence
            names = CenterNames(read.names.names, (), read.names.version)
        self._set_names(names)

    def _set_names(self, names: CenterNames) -> None:
        self.names = names
        self.centers = replace(self.centers, names=names.names)

    @cached_property
    def novelty_distances(self) -> NDArray[np.floating] | float | None:
        """Returns the distance (1 - cosine) to the nearest center within which most images like the
        clustered ones lie: per center, [K], or one for all.

        Centers without quantiles share the 95 % quantile of the rows that ship with them; None if
        there are too few rows.
        """
        if self.centers.quantiles is not None:
            return self.centers.quantiles
        audit_rows = self.centers.audit_rows
        if audit_rows is None or len(audit_rows) < MIN_ROWS_FOR_NOVELTY:
            return None
        rows = self.centers.align(unit_rows(audit_rows))
        return float(np.quantile(1 - self.scan.nearest(rows, 1).scores[:, 0], NOVELTY_QUANTILE))

    def remember(self, embeddings: Embeddings, neighbors: Neighbors) -> int | None:
        """Adds images to the recent ones, and returns how many lie beyond the quantile of their
        center; None without quantiles.

        neighbors: result of `nearest` for these embeddings.
        """
        if self.recent is None or not len(embeddings):
            return None
        ids, scores = neighbors.ids[:, 0].copy(), neighbors.scores[:, 0].copy()
        if (is_missing := ids < 0).any():  # below a threshold
            nearest = self.nearest(embeddings[is_missing], 1)
            ids[is_missing], scores[is_missing] = nearest.ids[:, 0], nearest.scores[:, 0]
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
        """Finds the `top` nearest centers (or all, if there are fewer) of unit rows of the model.

        engine_labels: labels that the engine returned; they save a scan and do not change the
        result.
        """
        rows, top = self.centers.align(embeddings), min(top, len(self.centers.vectors))
        min_product = None if threshold is None else min_dot_product(threshold)
        return self._nearest(embeddings, rows, top, min_product, mode, engine_labels).as_cosines()

    def _nearest(
        self,
        embeddings: Embeddings,
        rows: Embeddings,
        top: int,
        min_product: float | None,
        mode: LookupMode,
        engine_labels: EngineLabels | None,
    ) -> Neighbors:
        """Returns the nearest centers with their products, at least `min_product`."""
        if mode == "exact":
            if (
                engine_labels is not None
                and engine_labels.centers == self.centers.digest
                and engine_labels
            ):
                return self._complete_labels(engine_labels, embeddings, rows, top, min_product)
            return self.scan.nearest(rows, top, min_product)
        assert self.approximation is not None
        return self.approximation.scan.nearest(
            rows, top, min_product, probes=self.approximation.probes
        )

    def _complete_labels(
        self,
        engine_labels: EngineLabels,
        embeddings: Embeddings,
        rows: Embeddings,
        top: int,
        min_product: float | None,
    ) -> Neighbors:
        """Returns the engine's labels, and scans for rows without them."""
        has_labels, ids, exact = engine_labels.of(embeddings, rows, self.centers.vectors, top)
        neighbors = as_neighbors(ids, exact, top, min_product)
        if not has_labels.all():
            scanned = self.scan.nearest(rows[~has_labels], top, min_product)
            neighbors.ids[~has_labels] = scanned.ids
            neighbors.scores[~has_labels] = scanned.scores
        return neighbors


def _choose_audit_rows(
    centers: Centers, collections: Iterable[CollectionPort]
) -> tuple[str, Embeddings]:
    """Returns the source of the rows to audit, and the rows: unit rows of the model, [n, D], with n
    at least MIN_AUDITED_ROWS.
    """
    audit_rows = centers.audit_rows
    if audit_rows is not None and len(audit_rows) >= MIN_AUDITED_ROWS:
        return "centers", unit_rows(audit_rows)
    return "collections", _sample(collections, AUDITED_ROWS)


def _sample(collections: Iterable[CollectionPort], num: int) -> Embeddings:
    """Returns at most `num` indexed rows, [n, D], sampled by the hash of their positions."""
    all_rows = [collection.rows() for collection in collections]
    positions = [(take, row) for ids, take in all_rows for row in range(len(ids))]
    if len(positions) < MIN_AUDITED_ROWS:
        raise ConfigInvalid(
            f"approximate labels need an audit on {MIN_AUDITED_ROWS} rows or more, but the centers"
            " ship without audit rows (`mlcd cluster` writes them) and there are"
            f" {len(positions)} indexed images (--state)"
        )
    sample = np.argsort(hash_counters(np.arange(len(positions))), kind="stable")[:num]
    return np.concatenate([take(np.array([row])) for take, row in (positions[i] for i in sample)])
