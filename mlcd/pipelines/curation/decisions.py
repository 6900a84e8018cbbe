"""The decision on each image of a set, and the options that lead to it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.selection import SELECTION_SCHEMA
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.types import ISSUES, Issue

Keep = Literal["first", "best", "largest"]
UNREADABLE: Final = "unreadable"
LEAK: Final = "leak"
DUPLICATE: Final = "duplicate"
OUTLIER: Final = "outlier"
SURPLUS: Final = "surplus"
REASONS: Final = (UNREADABLE, *ISSUES, LEAK, DUPLICATE, OUTLIER, SURPLUS)


@dataclass(frozen=True, kw_only=True)
class CurateOptions:
    """The options that decide what is kept, in this order.

    issues: those of the pixels for which an image is left out. leaks: the cosine from which an
    image is a near duplicate of one of another set. duplicates: the cosine from which two images
    are near duplicates. keep: of each group of them,
    the first, the largest file, or the best: the one most similar to all others. outliers: the
    share of the images left that lie farthest out in their clusters. balance: so many are kept of
    those left, as evenly over the clusters as can be. hierarchical: so many, evenly over the
    clusters of each level. report: a page with pictures is written too.
    """

    issues: tuple[Issue, ...] = ()
    leaks: float | None = None
    duplicates: float | None = None
    keep: Keep = "first"
    outliers: float | None = None
    balance: int | None = None
    hierarchical: int | None = None
    seed: int = 0
    report: bool = False

    @property
    def reads_images(self) -> bool:
        return bool(self.issues or self.report or (self.duplicates and self.keep == "largest"))

    @property
    def by_cluster(self) -> bool:
        return (self.outliers, self.balance, self.hierarchical) != (None, None, None)

    def identity(self) -> dict[str, Any]:
        """Returns the options that are used, for the manifest."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        chosen["issues"] = list(self.issues)  # as JSON has them
        for name in ("issues", "report"):
            if not chosen[name]:
                del chosen[name]
        if self.duplicates is None:
            del chosen["keep"]
        if (self.balance, self.hierarchical) == (None, None):
            del chosen["seed"]
        return chosen

    def check(self, *, has_centers: bool, has_others: bool) -> None:
        """Raises InvalidInput for a value out of range, ConfigInvalid for options that do not go
        together.
        """
        for cosine in (self.duplicates, self.leaks):
            if cosine is not None and not 0 < cosine <= 1:
                raise InvalidInput(
                    f"the similarity of near duplicates must be a cosine in (0, 1], got {cosine:g}"
                )
        if (self.leaks is not None) != has_others:
            raise ConfigInvalid("--leaks and --against go together", remedy="give both or neither")
        if None not in (self.balance, self.hierarchical):
            raise ConfigInvalid(
                "--balance and --hierarchical exclude each other", remedy="give one of them"
            )
        if self.by_cluster != has_centers:
            raise ConfigInvalid(
                "--outliers, --balance and --hierarchical go together with --centers",
                remedy="give both or neither",
            )


@dataclass(frozen=True)
class Decisions:
    """The decision on each image, [N] each; its group is -1 outside of groups."""

    keep: NDArray[np.bool_]
    reasons: NDArray[np.object_]
    groups: NDArray[np.int64]

    @classmethod
    def all_kept(cls, num: int) -> "Decisions":
        reasons: NDArray[np.object_] = np.full(num, None)
        return cls(np.ones(num, np.bool_), reasons, np.full(num, -1, np.int64))

    @classmethod
    def read(cls, path: Path) -> "Decisions":
        """Reads what `table` was written to."""
        table = pq.read_table(path, schema=SELECTION_SCHEMA)
        reasons: NDArray[np.object_] = table["reason"].to_numpy()
        groups = pc.fill_null(table["group"], -1).to_numpy()
        return cls(table["keep"].to_numpy(), reasons, groups)

    @property
    def left(self) -> NDArray[np.int64]:
        """Returns the rows that are still kept."""
        return np.flatnonzero(self.keep)

    def leave_out(self, rows: NDArray[np.integer], reason: str) -> None:
        """Leaves out those of the rows that are still kept; the first reason stays."""
        rows = rows[self.keep[rows]]
        self.keep[rows], self.reasons[rows] = False, reason

    def facts(self) -> dict[str, int]:
        """Returns the counts."""
        facts = {"images": len(self.keep), "groups": int(self.groups.max(initial=-1)) + 1}
        facts |= {"kept": int(self.keep.sum())}
        return facts | {reason: int((self.reasons == reason).sum()) for reason in REASONS}

    def table(self, embeddings: EmbeddingsArtifact) -> pa.Table:
        return pa.table(
            [
                pa.array(embeddings.keys, pa.large_string()),
                pa.array(self.keep),
                pa.array(self.reasons, pa.string()),
                pa.array(self.groups, mask=self.groups < 0),
            ],
            schema=SELECTION_SCHEMA,
        )
