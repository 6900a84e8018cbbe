"""The metrics of collections: by name, or summed up for a scraper that may not know the names."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # faiss comes with it
    from mlcd.collections.collection import Collection, Description

_MAX_NAMED: Final = 100  # clients name them: the number of series must not grow with what clients do
_COUNTED: Final = {
    "items": "Items that can be found.",
    "indexed": "Items that its index was made of.",
    "unindexed": "Items that every search scans beside the index.",
}
_RECALL: Final = "Recall@10 that the audit of its index measured; none where searches are exact."


class CollectionMetrics(Collector):
    """Gauges of what `opened` holds at the time of a scrape."""

    def __init__(self, opened: Mapping[str, "Collection"], *, names: bool) -> None:
        """names: tell of each of the first hundred by its name; else their sums, and the worst recall."""
        self._opened, self._names = opened, names

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("mlcd_collections", "Collections that are open.", value=len(self._opened))
        if self._names:
            yield from _by_name({name: one.describe() for name, one in islice(self._opened.items(), _MAX_NAMED)})
        else:
            yield from _together([one.describe() for one in self._opened.values()])


def _by_name(described: Mapping[str, "Description"]) -> Iterator[GaugeMetricFamily]:
    for what, meaning in _COUNTED.items():
        family = GaugeMetricFamily(f"mlcd_collection_{what}", meaning, labels=["collection"])
        for name, one in described.items():
            family.add_metric([name], getattr(one, what))
        yield family
    recall = GaugeMetricFamily("mlcd_collection_recall", _RECALL, labels=["collection"])
    for name, one in described.items():
        if one.recall is not None:
            recall.add_metric([name], one.recall["measured"])
    yield recall


def _together(described: list["Description"]) -> Iterator[GaugeMetricFamily]:
    for what, meaning in _COUNTED.items():
        total = sum(getattr(one, what) for one in described)
        yield GaugeMetricFamily(f"mlcd_collection_{what}", meaning, value=total)
    recalls = [one.recall["measured"] for one in described if one.recall is not None]
    if recalls:
        yield GaugeMetricFamily("mlcd_collection_recall", _RECALL, value=min(recalls))
