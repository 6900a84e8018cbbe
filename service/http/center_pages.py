"""Centers in answers: a page of the list of centers, and one center with its neighbors."""

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
_MAX_SEARCHED_COLLECTIONS: Final = 4


@dataclass(frozen=True)
class Clustered:
    """The clusters of the collection that a request names."""

    name: str
    collection: CollectionPort
    clusters: Clusters


@dataclass(frozen=True)
class _Recent:
    """Counts for each center [K]: its recent query images, and how many of them were novel."""

    images: NDArray[np.int64]
    novel: NDArray[np.int64]

    @classmethod
    def from_lookup(cls, lookup: Lookup) -> "_Recent | None":
        """Counts the recent queries; None if the centers lack the distances that define novelty."""
        return None if lookup.recent is None else cls(*lookup.recent.by_center())

    @property
    def novelty(self) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            return self.novel / self.images

    def for_center(self, center: int) -> RecentQueries:
        return _build_recent_queries(int(self.images[center]), int(self.novel[center]))

    def for_all(self) -> RecentQueries:
        return _build_recent_queries(int(self.images.sum()), int(self.novel.sum()))


@dataclass(frozen=True)
class ListOptions:
    """The options of a list of centers, described at the route `list_centers`."""

    sort: Sort
    descending: bool
    name: str | None
    query: str | None
    minimums: dict[str, int]
    maximums: dict[str, int]
    examples: int
    limit: int
    cursor: str | None


def example_members(centers: Centers, center: int, num: int | None = None) -> list[dict[str, Any]]:
    """Returns the first `num` (default: all) example images stored with a center's artifact."""
    if centers.examples is None:
        return []
    return [
        {"collection": None, "id": example.key, "similarity": example.similarity}
        for example in centers.examples.of_center(center, num)
    ]


def build_center_list(
    resources: Resources, lookup: Lookup, clustered: Clustered | None, options: ListOptions
) -> CenterList:
    """Returns the requested page of the list of centers."""
    lookup.follow_names()
    centers, recent = lookup.centers, _Recent.from_lookup(lookup)
    values = _compute_values(lookup, clustered, recent)
    order = _order_centers(lookup, values, options)
    first = 0
    if options.cursor is not None:
        (last_center,) = read_cursor(options.cursor, int)
        ranks = np.flatnonzero(order == last_center)
        if not len(ranks):
            raise InvalidInput("unknown cursor", remedy="pass `next` of the previous page")
        first = int(ranks[0]) + 1
    page = order[first : first + options.limit]
    examples = _list_examples(lookup, clustered, page.tolist(), options.examples)
    return CenterList(
        **provenance(resources),
        digest=centers.digest,
        recent=recent and recent.for_all(),
        novelty_from=_find_novelty_source(lookup, clustered),
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
                recent=recent and recent.for_center(center),
                examples=center_examples,
            )
            for center, center_examples in zip(page.tolist(), examples, strict=True)
        ],
        next=write_cursor(int(page[-1])) if first + len(page) < len(order) else None,
        total=len(order),
    )


def _build_recent_queries(images: int, novel: int) -> RecentQueries:
    return RecentQueries(images=images, novelty=novel / images if images else None)


def _compute_values(
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
    novelty_distance = lookup.novelty_distances
    if novelty_distance is None:
        novelty_distance = clusters.novelty_distance
    return {
        **values,
        "members": clusters.num_members,
        "spread": clusters.spread,
        "novelty": unknown if novelty_distance is None else clusters.novelty(novelty_distance),
    }


def _find_novelty_source(
    lookup: Lookup, clustered: Clustered | None
) -> Literal["centers", "collection"] | None:
    """Returns which images define the novelty distance: those of the centers or the collection."""
    if clustered is None:
        return None
    if lookup.novelty_distances is not None:
        return "centers"
    return None if clustered.clusters.novelty_distance is None else "collection"


def _order_centers(
    lookup: Lookup, values: dict[str, NDArray[Any]], options: ListOptions
) -> NDArray[np.int64]:
    """Returns the ids of the centers that pass the filters, in order."""
    matches = np.ones(len(lookup.centers.vectors), dtype=np.bool_)
    for name, bound in options.minimums.items():
        matches &= values[name] >= bound
    for name, bound in options.maximums.items():
        matches &= values[name] <= bound
    if options.name is not None:
        folded_name = options.name.casefold()
        matches &= np.fromiter((folded_name in name for name in lookup.names.folded), np.bool_)
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
    center_ids = np.flatnonzero(matches)
    # unknown values come last in either direction
    return center_ids[np.argsort(np.nan_to_num(key[center_ids], nan=np.inf), kind="stable")]


def _list_examples(
    lookup: Lookup, clustered: Clustered | None, page: list[int], num: int
) -> list[list[Example]]:
    """Returns up to `num` examples of each center of a page."""
    if clustered is None:
        return [
            [Example(**example) for example in example_members(lookup.centers, center, num)]
            for center in page
        ]
    clusters = clustered.clusters
    ids = clusters.state.ids
    ranges = [range(clusters.members(c).start, clusters.members(c).stop)[:num] for c in page]
    shown_ids = [ids[clusters.positions[index]] for members in ranges for index in members]
    versions = iter(clustered.collection.thumbnail_versions(shown_ids))
    return [
        [
            Example(
                collection=clustered.name,
                id=ids[clusters.positions[index]],
                similarity=float(clusters.similarities[index]),
                thumbnail=next(versions),
            )
            for index in members
        ]
        for members in ranges
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
    """Returns a center with its neighbors and examples, described at the route `describe_center`.

    is_visible: takes a collection's name; returns whether its items may be examples.
    """
    lookup.follow_names()
    centers, recent = lookup.centers, _Recent.from_lookup(lookup)
    vector = centers.vectors[center : center + 1]
    num = min(_NUM_NEIGHBORS + 1, len(centers.vectors))
    nearest = lookup.scan.nearest(vector, num).as_cosines()
    neighbors = [
        Label(
            id=neighbor,
            similarity=score,
            name=centers.name(neighbor),
            cluster=centers.cluster(neighbor),
            path=centers.path(neighbor),
        )
        for neighbor, score in zip(nearest.ids[0].tolist(), nearest.scores[0].tolist(), strict=True)
        if neighbor != center
    ]
    members = [Example(**example) for example in example_members(centers, center)]
    evidence = lookup.names.evidence(center)
    collection_fields: dict[str, Any] = {}
    if clustered is None:
        searched = _choose_collections(resources, lookup, is_visible)
        items = _nearest_items(resources, searched, vector)
        collection_fields = {"collections": searched}
    else:
        (items,) = _list_examples(lookup, clustered, [center], _NUM_NEIGHBORS)
        values = _compute_values(lookup, clustered, recent)
        collection_fields = {
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
        recent=recent and recent.for_center(center),
        **collection_fields,
        nearest=neighbors[:_NUM_NEIGHBORS],
        examples=[*members, *items],
    )


def _choose_collections(
    resources: Resources, lookup: Lookup, is_visible: Callable[[str], bool]
) -> list[str]:
    """Returns the names of collections to search for examples: the first four visible ones."""
    if lookup.centers.mean is not None:
        # These centers are compared with embeddings minus the mean; a search does not subtract it.
        return []
    return sorted(filter(is_visible, resources.collections))[:_MAX_SEARCHED_COLLECTIONS]


def _nearest_items(resources: Resources, names: list[str], vector: Embeddings) -> list[Example]:
    """Returns the items nearest to a center, up to 8 from each collection."""
    collections, items = resources.collections, list[Example]()
    for name in names:
        if (collection := collections.get(name)) is None:  # deleted meanwhile
            continue
        matches = collection.search(vector, _NUM_NEIGHBORS).matches[0]
        versions = collection.thumbnail_versions([match.id for match in matches])
        items += [
            Example(collection=name, id=match.id, similarity=match.similarity, thumbnail=version)
            for match, version in zip(matches, versions, strict=True)
        ]
    return items
