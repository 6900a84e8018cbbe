"""The nearest class centers of embeddings: exactly, or approximately with an audit made at start."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from mlcd.artifacts.centers import Centers
from mlcd.clustering.approximate import (
    AUDITED_ROWS,
    MIN_AUDITED_ROWS,
    ApproximateScan,
    audit,
    divide,
    fewest_probes,
)
from mlcd.clustering.nearest import CenterScan
from mlcd.collections.collection import Collection
from mlcd.errors import ConfigInvalid
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings, Neighbors, unit_rows

LookupMode = Literal["exact", "approximate"]
_AUDITED_TOP: Final = 8  # what /v1/labels gives unless asked otherwise


@dataclass(frozen=True)
class Approximation:
    """audit: recall, low, high, rows, source, top, cells and probes, as answers show it."""

    scan: ApproximateScan
    probes: int
    audit: dict[str, Any]

    @classmethod
    def build(
        cls, centers: Centers, exact: CenterScan, collections: Iterable[Collection]
    ) -> "Approximation":
        """Cells of the centers, as few probes as recall allows, and the audit on other rows than chose them.

        The rows are those shipped with the centers, else indexed ones. Raises ConfigInvalid for too few centers or
        rows, or where no number of probes is enough.
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
    """Centers made ready once."""

    def __init__(self, centers: Centers) -> None:
        self.centers = centers
        # numpy: the service never loads torch, and the labels are the same by any arithmetic.
        self.scan = CenterScan(centers.vectors, products="numpy")
        self.approximation: Approximation | None = None

    def approximate(self, collections: Iterable[Collection]) -> None:
        """Make the approximate mode ready, audited on rows shipped with the centers, or indexed ones."""
        try:
            self.approximation = Approximation.build(self.centers, self.scan, collections)
        except ConfigInvalid as error:
            remedy = "leave MLCD_APPROXIMATE out: labels are then exact"
            raise ConfigInvalid(error.message, remedy=remedy) from error

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
        """The `top` nearest centers of unit rows as the model gives them; at most as many as there are."""
        rows, top = self.centers.align(embeddings), min(top, len(self.centers.vectors))
        if mode == "exact":
            return self.scan.nearest(rows, top, threshold)
        assert self.approximation is not None
        return self.approximation.scan.nearest(
            rows, top, threshold, probes=self.approximation.probes
        )


def _audited_rows(centers: Centers, collections: Iterable[Collection]) -> tuple[str, Embeddings]:
    """Whose rows they are, and the rows: unit [n, D] as the model gives them, MIN_AUDITED_ROWS of them or more."""
    shipped = centers.audit_rows
    if shipped is not None and len(shipped) >= MIN_AUDITED_ROWS:
        return "centers", unit_rows(shipped)
    return "collections", _sample(collections, AUDITED_ROWS)


def _sample(collections: Iterable[Collection], num: int) -> Embeddings:
    """At most `num` indexed rows, [n, D], drawn by the hash of their places."""
    opened = [collection.rows() for collection in collections]
    places = [(read, row) for ids, read in opened for row in range(len(ids))]
    if len(places) < MIN_AUDITED_ROWS:
        raise ConfigInvalid(
            f"approximate labels are audited on {MIN_AUDITED_ROWS} rows or more: these centers ship none, as"
            f" `mlcd cluster` writes them, and there are {len(places)} indexed images (--state)"
        )
    chosen = np.argsort(hash_counters(np.arange(len(places))), kind="stable")[:num]
    return np.concatenate([read(row, row + 1) for read, row in (places[place] for place in chosen)])
