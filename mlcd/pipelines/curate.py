"""Embeddings to a selection: which images to keep, and why the others are left out."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact, Request, open_artifact
from mlcd.clustering.close_pairs import close_pairs
from mlcd.clustering.novelty import nearest
from mlcd.clustering.selection import balanced, outliers
from mlcd.collections.duplicates import joined_groups
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.sources import open_source
from mlcd.locations import is_url
from mlcd.progress import Stages
from mlcd.types import Embeddings, unit_rows

Keep = Literal["first", "best", "largest"]
DECISIONS: Final = "decisions.parquet"
DUPLICATE: Final = "duplicate"
OUTLIER: Final = "outlier"
SURPLUS: Final = "surplus"
_DIGITS: Final = 6  # sums of cosines differ beyond them
_SCHEMA: Final = pa.schema(
    [
        ("key", pa.large_string()),
        ("keep", pa.bool_()),
        ("reason", pa.string()),
        ("group", pa.int64()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class CurateOptions:
    """The options that decide what is kept, in this order.

    duplicates: the cosine from which two images are near duplicates. keep: of each group of them,
    the first, the largest file, or the best: the one most similar to all others. outliers: the
    share of the images left that lie farthest out in their clusters. balance: so many are kept of
    those left, as evenly over the clusters as can be.
    """

    duplicates: float | None = None
    keep: Keep = "first"
    outliers: float | None = None
    balance: int | None = None
    seed: int = 0

    def identity(self) -> dict[str, Any]:
        """Returns the options that are used, for the manifest."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        if self.duplicates is None:
            del chosen["keep"]
        if self.balance is None:
            del chosen["seed"]
        return chosen


@dataclass(frozen=True)
class Decisions:
    """The decision on each image, [N] each; its group is -1 outside of groups."""

    keep: NDArray[np.bool_]
    reasons: NDArray[np.object_]
    groups: NDArray[np.int64]
    facts: dict[str, Any]


def curate(
    embeddings: EmbeddingsArtifact,
    out: Path,
    options: CurateOptions,
    reporter: Stages,
    *,
    centers: Path | None = None,
) -> Artifact:
    """Decides for each image whether it is kept, and writes `decisions.parquet`.

    centers: the clusters, for outliers and balance. Raises what `decide` raises.
    """
    artifact = None if centers is None else open_artifact(centers, "centers")
    parents = [embeddings.artifact.as_parent_of(out, "embeddings")]
    if artifact is not None:
        parents.append(artifact.as_parent_of(out, "centers"))
    request = Request("selection", options.identity(), tuple(parents), embeddings.fingerprint)
    if (done := find_published(out, request)) is not None:
        return done
    found = decide(embeddings, options, reporter, centers=artifact)
    with Draft(out, request) as draft:
        table = pa.table(
            [
                pa.array(embeddings.keys, pa.large_string()),
                pa.array(found.keep),
                pa.array(found.reasons, pa.string()),
                pa.array(found.groups, mask=found.groups < 0),
            ],
            schema=_SCHEMA,
        )
        with draft.write(DECISIONS) as path:
            pq.write_table(table, path)
        return draft.publish(summary=found.facts)


def decide(
    embeddings: EmbeddingsArtifact,
    options: CurateOptions,
    reporter: Stages,
    *,
    centers: Artifact | None = None,
) -> Decisions:
    """Returns the decision on each image, and writes nothing.

    Raises InvalidInput for a similarity that is none, or where `largest` has no image to look at;
    ConfigInvalid for outliers or balance without centers, or with those of another model.
    """
    if options.duplicates is not None and not 0 < options.duplicates <= 1:
        raise InvalidInput(
            f"{options.duplicates:g} is no similarity of near duplicates",
            remedy="give a cosine in (0, 1]",
        )
    by_cluster = (options.outliers, options.balance) != (None, None)
    if by_cluster != (centers is not None):
        raise ConfigInvalid(
            "outliers and a balance are those of clusters", remedy="give both or neither"
        )
    rows = unit_rows(embeddings.load())
    num = len(rows)
    keep, groups = np.ones(num, np.bool_), np.full(num, -1, np.int64)
    reasons: NDArray[np.object_] = np.full(num, None)
    facts: dict[str, Any] = {"images": num}
    if options.duplicates is not None:
        facts |= _leave_out_duplicates(embeddings, rows, options, reporter, keep, groups)
        reasons[~keep] = DUPLICATE
    if centers is not None:
        opened = Centers.read(centers)
        if opened.fingerprint != embeddings.fingerprint:
            raise ConfigInvalid(
                f"{centers.path} are centers of another model", remedy="cluster these embeddings"
            )
        ids, distances = nearest(opened.align(rows), opened.vectors)
        left = np.flatnonzero(keep)
        if options.outliers is not None:
            gone = left[outliers(ids[left], distances[left], options.outliers)]
            keep[gone], reasons[gone] = False, OUTLIER
            left = np.flatnonzero(keep)
        if options.balance is not None:
            gone = left[~balanced(ids[left], options.balance, seed=options.seed)]
            keep[gone], reasons[gone] = False, SURPLUS
    facts |= {"kept": int(keep.sum())}
    facts |= {reason: int((reasons == reason).sum()) for reason in (OUTLIER, SURPLUS)}
    return Decisions(keep, reasons, groups, facts)


def _leave_out_duplicates(
    embeddings: EmbeddingsArtifact,
    rows: Embeddings,
    options: CurateOptions,
    reporter: Stages,
    keep: NDArray[np.bool_],
    group: NDArray[np.int64],
) -> dict[str, Any]:
    """Sets `keep` and `group` of near duplicates, and returns what was found."""
    assert options.duplicates is not None
    ranked = _ranking(embeddings, options.keep)
    with reporter.stage("duplicates", len(rows)) as meter:
        pairs = close_pairs(rows, options.duplicates, meter=meter)
    groups = joined_groups(len(rows), pairs.first, pairs.second)
    for number, members in enumerate(groups):
        group[members], keep[members] = number, False
        keep[members[ranked(members, rows).argmax()]] = True
    all_pairs = len(rows) * (len(rows) - 1) / 2
    return {
        "groups": len(groups),
        "pairs": len(pairs.first),
        "compared": round(pairs.num_compared / max(1.0, all_pairs), _DIGITS),
    }


# rank(members [n], rows of all [N, D]) returns [n]: the highest is kept, of equals the first
_Rank: TypeAlias = Callable[[NDArray[np.int64], Embeddings], NDArray[np.float64]]


def _ranking(embeddings: EmbeddingsArtifact, keep: Keep) -> _Rank:
    if keep == "largest":
        sizes = _sizes(embeddings)
        return lambda members, _: sizes[members]
    return _likeness if keep == "best" else lambda members, _: np.zeros(len(members))


def _likeness(members: NDArray[np.int64], rows: Embeddings) -> NDArray[np.float64]:
    """Returns the sum of each member's cosines with all of them."""
    group = rows[members].astype(np.float64)
    sums: NDArray[np.float64] = np.einsum("nd,d->n", group, group.sum(axis=0))
    return np.round(sums, _DIGITS)


def _sizes(embeddings: EmbeddingsArtifact) -> NDArray[np.float64]:
    """Returns the size of each image's file in bytes. Raises NotFound where they are gone."""
    artifact = embeddings.artifact
    place = next((each.path for each in artifact.parents if each.role == "images"), None)
    if place is None:
        raise InvalidInput(
            f"{artifact.path} is of no images", remedy="keep the first or the best of each group"
        )
    if not is_url(place):
        place = os.path.normpath(artifact.path.resolve() / place)
    entries = open_source(place).entries
    found = entries.find(pa.chunked_array([embeddings.keys], pa.large_string())).tolist()
    if min(found, default=0) < 0:
        raise NotFound(
            f"{place} lacks the image {embeddings.keys[found.index(-1)]}",
            remedy="keep the first or the best of each group, which need no image",
        )
    return np.array([entries[index].size_bytes for index in found], dtype=np.float64)
