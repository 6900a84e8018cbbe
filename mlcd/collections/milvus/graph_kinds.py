"""The indexes of Milvus that collections can have.

Milvus makes the index of each of its segments by itself. What it promises nothing about is recall:
the effort of a search is chosen by our audit.
"""

from dataclasses import dataclass
from typing import Any, Final

from mlcd.indexes.tuning import EFFORTS, graph_efforts

METRIC: Final = "IP"  # of unit vectors: the cosine


@dataclass(frozen=True)
class Graph:
    """One kind of index.

    effort: the parameter of a search that says how far it looks. efforts: those that an audit
    tries. reach: the greatest that Milvus takes, for filters that leave little.
    """

    kind: str
    index_type: str
    build: dict[str, int]
    effort: str
    efforts: tuple[int, ...]
    reach: int

    def search_params(self, effort: int, num_answers: int) -> dict[str, Any]:
        """Returns the parameters of a search for `num_answers` neighbors."""
        least = 1 if self.kind == "ivf_flat" else num_answers  # a list of candidates holds them all
        looked_at = min(max(effort, least), self.reach)
        return {"metric_type": METRIC, "params": {self.effort: looked_at}}


_CELLS: Final = 1024
GRAPHS: Final[dict[str, Graph]] = {
    graph.kind: graph
    for graph in (
        Graph("hnsw", "HNSW", {"M": 16, "efConstruction": 128}, "ef", graph_efforts(), 32_768),
        Graph(
            "ivf_flat",
            "IVF_FLAT",
            {"nlist": _CELLS},
            "nprobe",
            tuple(effort for effort in EFFORTS if effort <= _CELLS),
            _CELLS,
        ),
    )
}
