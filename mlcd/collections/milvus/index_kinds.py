"""The Milvus indexes that collections can use.

Milvus builds an index for each of its segments, but does not promise a recall: our audit chooses
the effort of a search.
"""

from dataclasses import dataclass
from typing import Any, Final

from mlcd.indexes.tuning import EFFORTS, graph_efforts

METRIC: Final = "IP"  # inner product, which is the cosine of unit vectors


@dataclass(frozen=True)
class IndexKind:
    """One kind of index.

    effort_param: name of the search parameter for the effort. efforts: values that an audit tries,
    ascending. max_effort: greatest value that Milvus accepts; a selective filter raises the effort.
    """

    kind: str
    index_type: str
    build: dict[str, int]
    effort_param: str
    efforts: tuple[int, ...]
    max_effort: int

    def search_params(self, effort: int, num_answers: int) -> dict[str, Any]:
        """Returns the parameters of a search for `num_answers` neighbors."""
        # The candidate list of a graph must have room for all answers.
        least = 1 if self.kind == "ivf_flat" else num_answers
        value = min(max(effort, least), self.max_effort)
        return {"metric_type": METRIC, "params": {self.effort_param: value}}


_CELLS: Final = 1024
INDEX_KINDS: Final[dict[str, IndexKind]] = {
    index.kind: index
    for index in (
        IndexKind("hnsw", "HNSW", {"M": 16, "efConstruction": 128}, "ef", graph_efforts(), 32_768),
        IndexKind(
            "ivf_flat",
            "IVF_FLAT",
            {"nlist": _CELLS},
            "nprobe",
            tuple(effort for effort in EFFORTS if effort <= _CELLS),
            _CELLS,
        ),
    )
}
