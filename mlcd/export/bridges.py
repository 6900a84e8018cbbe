"""Bridges: maps from the space of one model's texts to the space of another's images.

A mixture says what a text resembles: it is a soft mixture of rows that are known in both spaces. A
linear bridge maps directions. Both are small and become part of the text tower's graph.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.export.onnx_graph import GraphWriter
from mlcd.types import Embeddings, unit_rows

Rows = NDArray[np.floating[Any]]


class Bridge(Protocol):
    """A map of unit rows [N, F] to unit rows [N, D]."""

    def apply(self, rows_NF: Rows) -> Embeddings: ...

    def add(self, graph: GraphWriter, rows: str) -> str:
        """Adds the bridge to a graph, and returns the name of the unit rows behind it."""
        ...


@dataclass(frozen=True)
class Mixture:
    """A row becomes softmax(cosines with the keys / temperature) times the values.

    keys_KF: unit rows in the space of texts. values_KD: the rows that stand for them in the space
    of images. shares_K: the weight of a key before anything is known, 1 where none is given.
    mean_F: subtracted from the rows, which are then made unit rows again, before they are compared.
    """

    keys_KF: Rows
    values_KD: Rows
    temperature: float
    shares_K: Rows | None = None
    mean_F: Rows | None = None

    def apply(self, rows_NF: Rows) -> Embeddings:
        rows = _centered(rows_NF, self.mean_F)
        scores_NK = rows @ self.keys_KF.T / self.temperature + self._log_shares()
        weights_NK = np.exp(scores_NK - scores_NK.max(axis=1, keepdims=True))
        return _unit(weights_NK @ self.values_KD)

    def add(self, graph: GraphWriter, rows: str) -> str:
        rows = _add_centered(graph, rows, self.mean_F)
        keys = graph.constant(_float32(self.keys_KF.T / self.temperature), "keys")
        scores = graph.add("MatMul", rows, keys)
        if self.shares_K is not None:
            shares = graph.constant(_float32(self._log_shares()), "shares")
            scores = graph.add("Add", scores, shares)
        weights = graph.add("Softmax", scores, axis=-1)
        values = graph.constant(_float32(self.values_KD), "values")
        return graph.unit_rows(graph.add("MatMul", weights, values))

    def _log_shares(self) -> Rows:
        return np.zeros(1) if self.shares_K is None else np.log(self.shares_K)


@dataclass(frozen=True)
class Linear:
    """A row times a matrix. mean_F: as that of `Mixture`."""

    matrix_FD: Rows
    mean_F: Rows | None = None

    def apply(self, rows_NF: Rows) -> Embeddings:
        return _unit(_centered(rows_NF, self.mean_F) @ self.matrix_FD)

    def add(self, graph: GraphWriter, rows: str) -> str:
        rows = _add_centered(graph, rows, self.mean_F)
        matrix = graph.constant(_float32(self.matrix_FD), "matrix")
        return graph.unit_rows(graph.add("MatMul", rows, matrix))


def _centered(rows: Rows, mean: Rows | None) -> Rows:
    return rows if mean is None else _unit(rows - mean)


def _add_centered(graph: GraphWriter, rows: str, mean: Rows | None) -> str:
    if mean is None:
        return rows
    return graph.unit_rows(graph.add("Sub", rows, graph.constant(_float32(mean), "mean")))


def _unit(rows: Rows) -> Embeddings:
    return unit_rows(rows.astype(np.float32))


def _float32(values: Rows) -> NDArray[np.float32]:
    return values.astype(np.float32)
