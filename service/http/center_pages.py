"""Centers as answers show them: a page of their list, and one of them with its neighbors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.collections.clusters import Clusters
from mlcd.collections.port import CollectionPort
from mlcd.errors import InvalidInput
from mlcd.service.http.answers import provenance
from mlcd.service.http.cursors import read_cursor, write_cursor
from mlcd.service.inference.lookup import Lookup
from mlcd.service.resources import Resources
from mlcd.types import Embeddings
from mlcd.wire.nearest_centers import (
    CenterList,
    DescribedCenter,
    Example,
    Label,
    ListedCenter,
    NameGrounds,
    RecentQueries,
)

Sort = Literal["size", "members", "name", "spread", "novelty", "recent", "id"]
_NUM_NEIGHBORS: Final = 8
_NUM_SEARCHED: Final = 4  # collections


@dataclass(frozen=True)
class Clustered:
    """The clusters of the collection that a request names."""

    name: str
    collection: CollectionPort
    clusters: Clusters


@dataclass(frozen=True)
class _Recent:
    """The recent queries of each center, and those of them that are novel, [K] each."""

    images: NDArray[np.int64]
    novel: NDArray[np.int64]

    @classmethod
    def of(cls, lookup: Lookup) -> "_Recent | None":
        """Counts them; None where the centers do not know what is novel."""
        return None if lookup.recent is None else cls(*lookup.recent.by_center())

    @property
    def novelty(self) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            return self.novel / self.images

    def of_center(self, center: int) -> RecentQueries:
        return _recent(int(self.images[center]), int(self.novel[center]))

    def of_all(self) -> RecentQueries:
        return _recent(int(self.images.sum()), int(self.novel.sum()))


@dataclass(frozen=True)
class ListOptions:
    """The options of a list of centers; see `list_centers`."""

    sort: Sort
    descending: bool
    name: str | None
    query: str | None
    least: dict[str, int]
    most: dict[str, int]
    examples: int
    limit: int
    cursor: str | None


def example_members(centers: Centers, center: int, num: int | None = None) -> list[dict[str, Any]]:
    """Returns the first `num` of the samples that shipped with a center, or all."""
    if centers.examples is None:
        return []
    return [
        {"collection": None, "id": example.key, "similarity": example.similarity}
        for example in centers.examples.of_center(center, num)
    ]


def build_center_list(
    resources: Resources, lookup: Lookup, clustered: Clustered | None, options: ListOptions
) -> CenterList:
    """Returns the page of the list that a request asks for."""
    lookup.follow_names()
    centers, recent = lookup.centers, _Recent.of(lookup)
    values = _values(lookup, clustered, recent)
    order = _order_centers(lookup, values, options)
    first = 0
    if options.cursor is not None:
        (last,) = read_cursor(options.cursor, int)
        places = np.flatnonzero(order == last)
        if not len(places):
            raise InvalidInput("unknown cursor", remedy="pass `next` of the previous page")
        first = int(places[0]) + 1
    page = order[first : first + options.limit]
    examples = _examples(lookup, clustered, page.tolist(), options.examples)
    return CenterList(
        **provenance(resources),
        digest=centers.digest,
        recent=recent and recent.of_all(),
        novelty_from=_novelty_from(lookup, clustered),
        collection=None if clustered is None else clustered.name,
        centers=[
            ListedCenter(
                id=center,
                name=centers.name(center),
                cluster=centers.cluster(center),
                path=centers.path(center),
                alternates=lookup.names.alternates(center),
                size=int(centers.sizes[center]),
                members=None if clustered is None else int(values["members"][center]),
                spread=_none_if_nan(values["spread"][center]),
                novelty=_none_if_nan(values["novelty"][center]),
                recent=recent and recent.of_center(center),
                examples=shown,
            )
            for center, shown in zip(page.tolist(), examples, strict=True)
        ],
        next=write_cursor(int(page[-1])) if first + len(page) < len(order) else None,
        total=len(order),
    )


def _recent(images: int, novel: int) -> RecentQueries:
    return RecentQueries(images=images, novelty=novel / images if images else None)


def _values(
    lookup: Lookup, clustered: Clustered | None, recent: _Recent | None
) -> dict[str, NDArray[Any]]:
    num = len(lookup.centers.vectors)
    unknown = np.full(num, np.nan)
    values: dict[str, NDArray[Any]] = {
        "size": lookup.centers.sizes,
        "id": np.arange(num),
        "recent": unknown if recent is None else recent.novelty,
    }
    if clustered is None:
        return {**values, "spread": unknown, "novelty": unknown}
    clusters = clustered.clusters
    farthest = lookup.ordinary_distances
    if farthest is None:
        farthest = clusters.ordinary_distance
    return {
        **values,
        "members": clusters.num_members,
        "spread": clusters.spread,
        "novelty": unknown if farthest is None else clusters.novelty(farthest),
    }


def _novelty_from(
    lookup: Lookup, clustered: Clustered | None
) -> Literal["centers", "collection"] | None:
    """Returns the images whose distances are the ordinary ones."""
    if clustered is None:
        return None
    if lookup.ordinary_distances is not None:
        return "centers"
    return None if clustered.clusters.ordinary_distance is None else "collection"


def _order_centers(
    lookup: Lookup, values: dict[str, NDArray[Any]], options: ListOptions
) -> NDArray[np.int64]:
    """Returns the centers that the filters leave, in order."""
    matches = np.ones(len(lookup.centers.vectors), dtype=np.bool_)
    for name, bound in options.least.items():
        matches &= values[name] >= bound
    for name, bound in options.most.items():
        matches &= values[name] <= bound
    if options.name is not None:
        part = options.name.casefold()
        matches &= np.fromiter((part in name for name in lookup.names.folded), np.bool_)
    if options.query is not None:
        words = options.query.casefold().split()
        texts = lookup.names.searched
        matches &= np.fromiter((all(word in text for word in words) for text in texts), np.bool_)
    if options.sort == "name":
        rank = lookup.names.ranks.astype(np.float64)
        key = np.where(np.isfinite(rank) & options.descending, -rank, rank)
    else:
        key = values[options.sort].astype(np.float64)
        key = -key if options.descending else key
    chosen = np.flatnonzero(matches)
    # unknown values come last in either direction
    return chosen[np.argsort(np.nan_to_num(key[chosen], nan=np.inf), kind="stable")]


def _examples(
    lookup: Lookup, clustered: Clustered | None, page: list[int], num: int
) -> list[list[Example]]:
    if clustered is None:
        return [
            [Example(**example) for example in example_members(lookup.centers, center, num)]
            for center in page
        ]
    clusters = clustered.clusters
    ids = clusters.searcher.ids
    parts = [range(clusters.members(c).start, clusters.members(c).stop)[:num] for c in page]
    shown = [ids[clusters.positions[place]] for part in parts for place in part]
    versions = iter(clustered.collection.thumbnail_versions(shown))
    return [
        [
            Example(
                collection=clustered.name,
                id=ids[clusters.positions[place]],
                similarity=float(clusters.similarities[place]),
                thumbnail=next(versions),
            )
            for place in part
        ]
        for part in parts
    ]


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def build_described_center(
    center: int,
    resources: Resources,
    lookup: Lookup,
    clustered: Clustered | None,
    *,
    is_visible: Callable[[str], bool],
) -> DescribedCenter:
    """Returns a center with its neighbors and examples; see `describe_center`.

    is_visible: tells of a collection whether its items may be examples.
    """
    lookup.follow_names()
    centers, recent = lookup.centers, _Recent.of(lookup)
    vector = centers.vectors[center : center + 1]
    num = min(_NUM_NEIGHBORS + 1, len(centers.vectors))
    near = lookup.scan.nearest(vector, num).as_cosines()
    neighbors = [
        Label(
            id=neighbor,
            similarity=score,
            name=centers.name(neighbor),
            cluster=centers.cluster(neighbor),
            path=centers.path(neighbor),
        )
        for neighbor, score in zip(near.ids[0].tolist(), near.scores[0].tolist(), strict=True)
        if neighbor != center
    ]
    members = [Example(**example) for example in example_members(centers, center)]
    evidence = lookup.names.evidence(center)
    counted: dict[str, Any] = {}
    if clustered is None:
        searched = _choose_collections(resources, lookup, is_visible)
        items = _nearest_items(resources, searched, vector)
        counted = {"collections": searched}
    else:
        (items,) = _examples(lookup, clustered, [center], _NUM_NEIGHBORS)
        values = _values(lookup, clustered, recent)
        counted = {
            "members": int(values["members"][center]),
            "spread": _none_if_nan(values["spread"][center]),
            "novelty": _none_if_nan(values["novelty"][center]),
        }
    return DescribedCenter(
        **provenance(resources),
        centers=centers.digest,
        id=center,
        size=int(centers.sizes[center]),
        name=centers.name(center),
        cluster=centers.cluster(center),
        path=centers.path(center),
        alternates=lookup.names.alternates(center),
        evidence=evidence and NameGrounds(**evidence),
        recent=recent and recent.of_center(center),
        **counted,
        nearest=neighbors[:_NUM_NEIGHBORS],
        examples=[*members, *items],
    )


def _choose_collections(
    resources: Resources, lookup: Lookup, is_visible: Callable[[str], bool]
) -> list[str]:
    """Returns the visible collections to search for examples, the first few of maybe thousands."""
    if lookup.centers.mean is not None:
        # Centers with a mean compare embeddings less the mean: a search is not in that space.
        return []
    return sorted(filter(is_visible, resources.collections))[:_NUM_SEARCHED]


def _nearest_items(resources: Resources, names: list[str], vector: Embeddings) -> list[Example]:
    """Returns the items of each collection that are nearest to a center."""
    collections, items = resources.collections, list[Example]()
    for name in names:
        if (collection := collections.get(name)) is None:  # deleted just now
            continue
        matches = collection.search(vector, _NUM_NEIGHBORS).matches[0]
        versions = collection.thumbnail_versions([match.id for match in matches])
        items += [
            Example(collection=name, id=match.id, similarity=match.similarity, thumbnail=version)
            for match, version in zip(matches, versions, strict=True)
        ]
    return items
