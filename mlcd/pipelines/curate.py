"""Embeddings to a selection: which images to keep, and why the others are left out."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.clustering.close_pairs import close_pairs
from mlcd.collections.duplicates import joined_groups
from mlcd.errors import InvalidInput, NotFound
from mlcd.images.sources import open_source
from mlcd.locations import is_url
from mlcd.progress import Stages
from mlcd.types import Embeddings, unit_rows

Keep = Literal["first", "best", "largest"]
DECISIONS: Final = "decisions.parquet"
DUPLICATE: Final = "duplicate"
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
    """The options that decide what is kept.

    duplicates: the cosine from which two images are near duplicates. keep: of each group of them,
    the first, the largest file, or the best: the one most similar to all others.
    """

    duplicates: float
    keep: Keep = "first"


def curate(
    embeddings: EmbeddingsArtifact, out: Path, options: CurateOptions, reporter: Stages
) -> Artifact:
    """Decides for each image whether it is kept, and writes `decisions.parquet`.

    Raises InvalidInput for a similarity that is none, or where `largest` has no image to look at.
    """
    if not 0 < options.duplicates <= 1:
        raise InvalidInput(
            f"{options.duplicates:g} is no similarity of near duplicates",
            remedy="give a cosine in (0, 1]",
        )
    request = Request(
        "selection",
        {"duplicates": options.duplicates, "keep": options.keep},
        (embeddings.artifact.as_parent_of(out, "embeddings"),),
        embeddings.fingerprint,
    )
    if (done := find_published(out, request)) is not None:
        return done
    ranked = _ranking(embeddings, options.keep)
    with Draft(out, request) as draft:
        rows = unit_rows(embeddings.load())
        with reporter.stage("duplicates", len(rows)) as meter:
            pairs = close_pairs(rows, options.duplicates, meter=meter)
        groups = joined_groups(len(rows), pairs.first, pairs.second)
        keep, group = np.ones(len(rows), np.bool_), np.full(len(rows), -1, np.int64)
        for number, members in enumerate(groups):
            group[members], keep[members] = number, False
            keep[members[ranked(members, rows).argmax()]] = True
        table = pa.table(
            [
                pa.array(embeddings.keys, pa.large_string()),
                pa.array(keep),
                pa.array([None if kept else DUPLICATE for kept in keep.tolist()], pa.string()),
                pa.array(group, mask=group < 0),
            ],
            schema=_SCHEMA,
        )
        with draft.write(DECISIONS) as path:
            pq.write_table(table, path)
        all_pairs = len(rows) * (len(rows) - 1) / 2
        summary = {
            "images": len(rows),
            "kept": int(keep.sum()),
            "groups": len(groups),
            "pairs": len(pairs.first),
            "compared": round(pairs.num_compared / max(1.0, all_pairs), _DIGITS),
        }
        return draft.publish(summary=summary)


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
