"""Queries that are moved away from what is not wanted, by Rocchio's formula.

    q' = q - weight * mean(unwanted), of unit length

J. J. Rocchio: Relevance Feedback in Information Retrieval, 1971. Wanted items do not take part:
several queries are several searches.
"""

import numpy as np

from mlcd.errors import InvalidInput
from mlcd.types import Embeddings, unit_rows


def move_away(queries: Embeddings, unwanted: Embeddings, weight: float) -> Embeddings:
    """Returns unit queries [Q, D] that are less like `unwanted` [U, D].

    Raises InvalidInput where nothing would be left of a query.
    """
    moved = queries - np.float32(weight) * unwanted.mean(axis=0)
    if not np.linalg.norm(moved, axis=1).all():
        raise InvalidInput(
            "nothing is left of a query without these items", remedy="give a smaller weight"
        )
    return unit_rows(moved)
