"""Searches the labels of a part: exactly, or approximately with an audit.

Both write a note for each part, which the summary adds up. Notes are hidden files of the draft and
no part of the artifact, so the digest of the labels does not depend on the arithmetic.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.clustering.approximate import ApproximateScan, Cells, audit, divide, fewest_probes
from mlcd.clustering.nearest import BlockedScan, CenterScan
from mlcd.pipelines.label_inputs import EmbeddingsInput
from mlcd.types import Embeddings, Neighbors, SampleKey, min_dot_product

_LEVELS: Final = ("proven", "wider", "float32", "float64")
_AUDITED_ROWS: Final = 2000
_AUDIT: Final = ".audit.json"
_TRUNCATED: Final = "truncated"
_CELLS: Final = (".cells.npy", ".cell-of-center.npy")


class LabelSearch(Protocol):
    """Finds the labels of a part."""

    # settings of the search, for the identity of the request
    config: dict[str, Any]

    def prepare(self, draft: Draft) -> None:
        """Prepares the search; called once, before the first part."""
        ...

    def nearest(self, draft: Draft, part: int, embeddings: Embeddings) -> Neighbors:
        """Returns the labels of unit rows, mean not subtracted; writes a note on the search."""
        ...

    def summary(self, draft: Draft, parts: Sequence[int]) -> dict[str, Any]:
        """Returns the summary of the notes of these parts."""
        ...


class ExactSearch:
    """The `LabelSearch` protocol with the certified scan."""

    def __init__(
        self,
        centers: Centers,
        *,
        top: int,
        threshold: float | None,
        scan: BlockedScan | None = None,
    ) -> None:
        """scan: scan over blocks of centers; None if all centers are in memory."""
        self.config: dict[str, Any] = {"mode": "exact"}
        self._centers, self._top, self._threshold = centers, top, threshold
        self._blocked = scan

    @cached_property
    def _scan(self) -> CenterScan | BlockedScan:
        return self._blocked or CenterScan(self._centers.vectors)

    def prepare(self, draft: Draft) -> None: ...

    def nearest(self, draft: Draft, part: int, embeddings: Embeddings) -> Neighbors:
        num_labels = _num_to_search(self._top, self._threshold)
        rows = self._centers.align(embeddings)
        neighbors = self._scan.nearest(
            rows, num_labels, _lowest_product(self._threshold)
        ).as_cosines()
        assert neighbors.scan is not None
        draft.write_json(
            _note_name(part), asdict(neighbors.scan) | _count_truncated(neighbors, self._top)
        )
        return _keep_top(neighbors, self._top)

    def summary(self, draft: Draft, parts: Sequence[int]) -> dict[str, Any]:
        """Returns the arithmetics that the scans used, and the number of rows settled per level."""
        notes = [_read_note(draft, part) for part in parts]
        products = sorted({note["products"] for note in notes})
        levels = {level: sum(note[level] for note in notes) for level in _LEVELS}
        return {"scan": {"products": products, **levels}, **_sum_truncated(notes, self._threshold)}


def _note_name(part: int) -> str:
    return f".search-{part:05d}.json"


def _read_note(draft: Draft, part: int) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((draft.path / _note_name(part)).read_text())
    return note


def _num_to_search(top: int, threshold: float | None) -> int:
    """Returns the number of labels to search: one more than `top` with a threshold, to see whether
    a row has more.
    """
    return top if threshold is None else top + 1


def _lowest_product(threshold: float | None) -> float | None:
    return None if threshold is None else min_dot_product(threshold)


def _keep_top(neighbors: Neighbors, top: int) -> Neighbors:
    return Neighbors(neighbors.ids[:, :top], neighbors.scores[:, :top], neighbors.scan)


def _count_truncated(neighbors: Neighbors, top: int) -> dict[str, int]:
    return {_TRUNCATED: int((neighbors.ids[:, top:] >= 0).sum())}


def _sum_truncated(notes: list[dict[str, Any]], threshold: float | None) -> dict[str, int]:
    """Returns the number of rows that have more than `top` centers above the threshold."""
    return {} if threshold is None else {_TRUNCATED: sum(note[_TRUNCATED] for note in notes)}


class ApproximateSearch:
    """The `LabelSearch` protocol with cells of centers.

    Without `probes`, the number of probed cells is the smallest with sufficient recall on a sample
    of rows. The audit measures the recall on a second sample. Both are drawn by the hash of the
    keys, so they do not depend on the order of the work.
    """

    def __init__(
        self,
        centers: Centers,
        rows: EmbeddingsInput,
        *,
        top: int,
        threshold: float | None,
        probes: int | None,
    ) -> None:
        self.config: dict[str, Any] = {"mode": "approximate", "probes": probes or "auto"}
        self._centers, self._rows = centers, rows
        self._top, self._threshold, self._probes = top, threshold, probes
        self._prepared: tuple[ApproximateScan, int] | None = None

    def prepare(self, draft: Draft) -> None:
        if draft.has(_AUDIT):
            return
        cells = divide(self._centers.vectors)
        for name, array in zip(_CELLS, (cells.vectors, cells.of_center), strict=True):
            with draft.write(name) as path, path.open("wb") as file:
                np.save(file, array, allow_pickle=False)
        scan = ApproximateScan(self._centers.vectors, cells)
        rows = self._centers.align(_draw_sample(self._rows, 2 * _AUDITED_ROWS))
        exact = CenterScan(self._centers.vectors).nearest(rows, self._top).ids
        tuning, audited = slice(0, None, 2), slice(1 if len(rows) > 1 else 0, None, 2)
        probes = self._probes or fewest_probes(scan, rows[tuning], exact[tuning])
        recall = audit(scan, rows[audited], exact[audited], probes)
        draft.write_json(
            _AUDIT, {"probes": probes, "cells": scan.num_cells, "top": self._top, **asdict(recall)}
        )

    def nearest(self, draft: Draft, part: int, embeddings: Embeddings) -> Neighbors:
        scan, probes = self._open(draft)
        num_labels = _num_to_search(self._top, self._threshold)
        neighbors = scan.nearest(
            self._centers.align(embeddings),
            num_labels,
            _lowest_product(self._threshold),
            probes=probes,
        ).as_cosines()
        draft.write_json(_note_name(part), _count_truncated(neighbors, self._top))
        return _keep_top(neighbors, self._top)

    def summary(self, draft: Draft, parts: Sequence[int]) -> dict[str, Any]:
        notes = [_read_note(draft, part) for part in parts]
        return {"audit": _read_audit(draft), **_sum_truncated(notes, self._threshold)}

    def _open(self, draft: Draft) -> tuple[ApproximateScan, int]:
        if self._prepared is None:
            cells = Cells(*(np.load(draft.file(name), allow_pickle=False) for name in _CELLS))
            self._prepared = (
                ApproximateScan(self._centers.vectors, cells),
                int(_read_audit(draft)["probes"]),
            )
        return self._prepared


def _read_audit(draft: Draft) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(draft.file(_AUDIT).read_text())
    return facts


def _draw_sample(rows: EmbeddingsInput, num: int) -> Embeddings:
    """Returns the `num` rows whose keys have the smallest hashes, in order of the hash, [n, D]."""
    hashes, row_ids = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for block in rows.blocks:
        keys, _ = rows.embeddings.read_keys(block)
        hashes = np.concatenate([hashes, _hash_keys(keys)])
        row_ids = np.concatenate([row_ids, block.start + np.arange(block.num_rows)])
        chosen = np.argsort(hashes, kind="stable")[:num]
        hashes, row_ids = hashes[chosen], row_ids[chosen]
    sampled = np.empty((len(row_ids), rows.embeddings.dimension), np.float32)
    for block in rows.blocks:
        inside = (row_ids >= block.start) & (row_ids < block.start + block.num_rows)
        if inside.any():
            sampled[inside] = rows.embeddings.read(block)[row_ids[inside] - block.start]
    return sampled


def _hash_keys(keys: list[SampleKey]) -> NDArray[np.uint64]:
    digests = b"".join(hashlib.sha256(key.encode()).digest()[:8] for key in keys)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
