"""The first centers of k-means: distinct rows, drawn by a hash of (seed, row)."""

from collections.abc import Sequence

import numpy as np

from mlcd.errors import InvalidInput
from mlcd.randomness import permutation
from mlcd.types import Embeddings


def distinct_rows(rows: Sequence[Embeddings], num_clusters: int, seed: int) -> Embeddings:
    """[K, D]: K rows that differ from each other, the same for any block size.

    Raises InvalidInput when there are fewer distinct rows than clusters.
    """
    offsets = np.cumsum([0, *(len(block) for block in rows)])
    chosen: list[Embeddings] = []
    seen: set[bytes] = set()
    for row in permutation(int(offsets[-1]), seed):
        block = int(np.searchsorted(offsets, row, side="right")) - 1
        candidate = rows[block][row - offsets[block]]
        if (content := candidate.tobytes()) not in seen:
            seen.add(content)
            chosen.append(candidate)
            if len(chosen) == num_clusters:
                return np.stack(chosen)
    raise InvalidInput(
        f"{num_clusters} clusters were asked of {len(chosen)} distinct embeddings",
        remedy=f"ask for at most {len(chosen)} clusters",
    )
