"""Moves queries away from unwanted items, by Rocchio's formula.

    q' = q - weight * mean(unwanted), scaled to norm 1

J. J. Rocchio: Relevance Feedback in Information Retrieval, 1971. The formula's term for wanted
items is not used: each wanted item is a query of its own.
"""

import numpy as np

from mlcd.errors import InvalidInput
from mlcd.types import Embeddings, unit_rows


def move_away(queries: Embeddings, unwanted: Embeddings, weight: float) -> Embeddings:
    """Returns unit queries [Q, D], moved away from the mean of `unwanted` [U, D].

    Raises InvalidInput if a moved query is zero.
    """
    moved = queries - np.float32(weight) * unwanted.mean(axis=0)
    if not np.linalg.norm(moved, axis=1).all():
        raise InvalidInput(
            "nothing is left of a query without these items", remedy="give a smaller weight"
        )
    return unit_rows(moved)
