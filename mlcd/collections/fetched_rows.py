"""Rows of items read from a remote store."""

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.item import FoundItem, Item
from mlcd.types import Embeddings, cosines


@dataclass(frozen=True)
class FetchedRows:
    """Items of a remote store. rows: row numbers, int64 [n]. metadata: JSON. vectors: [n, D]
    float32.
    """

    rows: NDArray[np.int64]
    ids: list[str]
    metadata: list[str]
    vectors: Embeddings

    def items(self) -> list[Item]:
        return [
            Item(item_id, vector, json.loads(metadata))
            for item_id, vector, metadata in zip(self.ids, self.vectors, self.metadata, strict=True)
        ]

    def score(self, query: Embeddings) -> list[FoundItem]:
        """Returns the items with their similarity to a unit query [D], computed here in float32;
        best first, ties by row.
        """
        scores = self.vectors @ query
        similarities = cosines(scores).tolist()
        return [
            FoundItem(self.ids[index], similarities[index], self.metadata[index])
            for index in np.lexsort((self.rows, -scores)).tolist()
        ]
