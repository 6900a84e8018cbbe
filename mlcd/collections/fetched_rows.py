"""The rows of items as a store behind a URL gave them."""

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.item import FoundItem, Item
from mlcd.types import Embeddings, cosines


@dataclass(frozen=True)
class FetchedRows:
    """Rows of a store. rows: int64 [n]. metadata: JSON. vectors: [n, D] float32."""

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
        """Returns the rows with our own similarities to a unit query [D], best first."""
        scores = self.vectors @ query
        similarities = cosines(scores).tolist()
        return [
            FoundItem(self.ids[place], similarities[place], self.metadata[place])
            for place in np.lexsort((self.rows, -scores)).tolist()
        ]
