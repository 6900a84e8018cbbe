"""The nearest centers of embeddings, exact or approximate; approximation is audited at start."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

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
from mlcd.clustering.nearest import CenterScan
from mlcd.collections.clusters import LEAST_ORDINARY, ORDINARY
from mlcd.collections.collection import Collection
from mlcd.errors import ConfigInvalid
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings, Neighbors, unit_rows
from service.inference.center_names import CenterNames

LookupMode = Literal["exact", "approximate"]
_AUDITED_TOP: Final = 8  # the default `top` of /v1/labels


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
        cls, centers: Centers, exact: CenterScan, collections: Iterable[Collection]
    ) -> "Approximation":
        """Divides the centers into cells, chooses as few probes as recall allows, and audits them.

        The audit uses other rows than the choice. The rows are those shipped with the centers, else
        indexed ones. Raises ConfigInvalid for too few centers or rows, or where no number of probes
        is enough.
        """
        source, unaligned = _audited_rows(centers, collections)
        rows = centers.align(unaligned)
        top = min(_AUDITED_TOP, len(centers.vectors))
        scan = ApproximateScan(centers.vectors, divide(centers.vectors))
        true = exact.nearest(rows, top).ids
        probes = fewest_probes(scan, rows[::2], true[::2])
        found = audit(scan, rows[1::2], true[1::2], probes)
        seen = {
            "recall": found.recall,
            "low": found.low,
            "high": found.high,
            "rows": found.rows,
            "source": source,
        }
        return cls(scan, probes, {**seen, "top": top, "cells": scan.num_cells, "probes": probes})


class Lookup:
    """The centers, prepared once for look-ups."""

    def __init__(self, centers: Centers, artifact: Artifact | None = None) -> None:
        """artifact: that of the centers, beside which their names are kept."""
        self.centers = centers
        self._artifact = artifact
        self._renaming = threading.Lock()
        self.names = (
            CenterNames(centers.names or (None,) * len(centers.vectors), ())
            if artifact is None
            else CenterNames.read(artifact)
        )
        # The service never loads torch, and numpy's labels are the same.
        self.scan = CenterScan(centers.vectors, matmul="numpy")
        self.approximation: Approximation | None = None

    def approximate(self, collections: Iterable[Collection]) -> None:
        """Prepares the approximate mode, audited on the centers' own rows or on indexed ones."""
        try:
            self.approximation = Approximation.build(self.centers, self.scan, collections)
        except ConfigInvalid as error:
            remedy = "leave MLCD_APPROXIMATE out: labels are then exact"
            raise ConfigInvalid(error.message, remedy=remedy) from error

    def rename(self, center: int, name: str | None) -> CenterNames:
        """Gives a center a name, durably, and returns the names since. None takes its name away."""
        assert self._artifact is not None
        with self._renaming:
            self.names = self.names.changed(self._artifact, center, name)
            self.centers = replace(self.centers, names=self.names.names)
            return self.names

    @cached_property
    def ordinary_distance(self) -> float | None:
        """Returns the 95 % quantile of 1 - cosine to the nearest center, of images like those that
        were clustered.

        They are the rows that ship with the centers; the result is None where those are too few.
        """
        shipped = self.centers.audit_rows
        if shipped is None or len(shipped) < LEAST_ORDINARY:
            return None
        rows = self.centers.align(unit_rows(shipped))
        return float(np.quantile(1 - self.scan.nearest(rows, 1).scores[:, 0], ORDINARY))

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
    ) -> Neighbors:
        """Finds the `top` nearest centers, or all if fewer, of unit rows from the model."""
        rows, top = self.centers.align(embeddings), min(top, len(self.centers.vectors))
        if mode == "exact":
            return self.scan.nearest(rows, top, threshold)
        assert self.approximation is not None
        return self.approximation.scan.nearest(
            rows, top, threshold, probes=self.approximation.probes
        )


def _audited_rows(centers: Centers, collections: Iterable[Collection]) -> tuple[str, Embeddings]:
    """Returns the source of the rows to audit, and the rows.

    The rows are unit [n, D] as the model gives them, with n of at least MIN_AUDITED_ROWS.
    """
    shipped = centers.audit_rows
    if shipped is not None and len(shipped) >= MIN_AUDITED_ROWS:
        return "centers", unit_rows(shipped)
    return "collections", _sample(collections, AUDITED_ROWS)


def _sample(collections: Iterable[Collection], num: int) -> Embeddings:
    """Returns at most `num` indexed rows, [n, D], drawn by the hash of their positions."""
    opened = [collection.rows() for collection in collections]
    positions = [(read, row) for ids, read in opened for row in range(len(ids))]
    if len(positions) < MIN_AUDITED_ROWS:
        raise ConfigInvalid(
            f"approximate labels are audited on {MIN_AUDITED_ROWS} rows or more: these centers ship"
            " none, as `mlcd cluster` writes them, and there are"
            f" {len(positions)} indexed images (--state)"
        )
    chosen = np.argsort(hash_counters(np.arange(len(positions))), kind="stable")[:num]
    return np.concatenate([read(row, row + 1) for read, row in (positions[i] for i in chosen)])
