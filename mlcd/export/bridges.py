"""Bridges: maps from the space of one model's texts to the space of another's images.

A mixture maps a text to a weighted mean of rows that are known in both spaces. A linear bridge
multiplies by a matrix. Both are small and become part of the text tower's graph.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.export.onnx_graph import GraphWriter
from mlcd.types import Embeddings, unit_rows

Rows = NDArray[np.floating[Any]]


class Bridge(Protocol):
    """A map from unit rows [N, F] to unit rows [N, D]."""

    def apply(self, rows_NF: Rows) -> Embeddings: ...

    def add(self, graph: GraphWriter, rows: str) -> str:
        """Adds the bridge to a graph, and returns the name of its output, unit rows."""
        ...


@dataclass(frozen=True)
class Mixture:
    """Maps a row to softmax(cosines with the keys / temperature) times the values.

    keys: unit rows in the space of texts, [K, F]. values: corresponding rows in the space of
    images, [K, D]. shares: prior weight of each key, [K]; None weights them equally. mean: [F],
    subtracted from the input rows, which are then normalized again; None subtracts nothing.
    """

    keys: Rows
    values: Rows
    temperature: float
    shares: Rows | None = None
    mean: Rows | None = None

    def apply(self, rows_NF: Rows) -> Embeddings:
        rows = _center(rows_NF, self.mean)
        scores_NK = rows @ self.keys.T / self.temperature + self._log_shares()
        weights_NK = np.exp(scores_NK - scores_NK.max(axis=1, keepdims=True))
        return _unit(weights_NK @ self.values)

    def add(self, graph: GraphWriter, rows: str) -> str:
        rows = _add_centered(graph, rows, self.mean)
        scaled = graph.constant(_float32(self.keys.T / self.temperature), "keys")
        scores = graph.add("MatMul", rows, scaled)
        if self.shares is not None:
            scores = graph.add(
                "Add", scores, graph.constant(_float32(self._log_shares()), "shares")
            )
        weights = graph.add("Softmax", scores, axis=-1)
        values = graph.constant(_float32(self.values), "values")
        return graph.unit_rows(graph.add("MatMul", weights, values))

    def _log_shares(self) -> Rows:
        return np.zeros(1) if self.shares is None else np.log(self.shares)


@dataclass(frozen=True)
class Linear:
    """Multiplies a row by a matrix [F, D]. mean: see `Mixture`."""

    matrix: Rows
    mean: Rows | None = None

    def apply(self, rows_NF: Rows) -> Embeddings:
        return _unit(_center(rows_NF, self.mean) @ self.matrix)

    def add(self, graph: GraphWriter, rows: str) -> str:
        rows = _add_centered(graph, rows, self.mean)
        matrix = graph.constant(_float32(self.matrix), "matrix")
        return graph.unit_rows(graph.add("MatMul", rows, matrix))


def _center(rows: Rows, mean: Rows | None) -> Rows:
    return rows if mean is None else _unit(rows - mean)


def _add_centered(graph: GraphWriter, rows: str, mean: Rows | None) -> str:
    if mean is None:
        return rows
    return graph.unit_rows(graph.add("Sub", rows, graph.constant(_float32(mean), "mean")))


def _unit(rows: Rows) -> Embeddings:
    return unit_rows(rows.astype(np.float32))


def _float32(values: Rows) -> NDArray[np.float32]:
    return values.astype(np.float32)
