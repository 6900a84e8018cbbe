"""The decisions of a curation, and its options."""

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
    """The options that determine which images are kept; the steps run in this order.

    issues: pixel issues for which an image is left out. leaks: minimum cosine to an image of the
    other set at which an image is left out. duplicates: minimum cosine of near duplicates. keep:
    image to keep of each group of near duplicates: the first, the largest file, or the best, which
    is most similar to the whole group. outliers: share of the remaining images to leave out, those
    farthest from their centers. balance: number of images to keep, as evenly over the clusters as
    possible. hierarchical: number of images to keep, evenly over the clusters of each level.
    report: also write a page with example images.
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
        options = {name: value for name, value in asdict(self).items() if value is not None}
        options["issues"] = list(self.issues)  # JSON has no tuples
        for name in ("issues", "report"):
            if not options[name]:
                del options[name]
        if self.duplicates is None:
            del options["keep"]
        if (self.balance, self.hierarchical) == (None, None):
            del options["seed"]
        return options

    def check(self, *, has_centers: bool, has_against: bool) -> None:
        """Raises InvalidInput for a value out of range, ConfigInvalid for options that exclude or
        require each other.
        """
        for cosine in (self.duplicates, self.leaks):
            if cosine is not None and not 0 < cosine <= 1:
                raise InvalidInput(
                    f"the similarity of near duplicates must be a cosine in (0, 1], got {cosine:g}"
                )
        if (self.leaks is not None) != has_against:
            raise ConfigInvalid(
                "--leaks and --against require each other", remedy="give both or neither"
            )
        if None not in (self.balance, self.hierarchical):
            raise ConfigInvalid(
                "--balance and --hierarchical exclude each other", remedy="give one of them"
            )
        if self.by_cluster != has_centers:
            raise ConfigInvalid(
                "--centers and one of --outliers, --balance and --hierarchical require each other",
                remedy="give both or neither",
            )


@dataclass(frozen=True)
class Decisions:
    """The decision on each image, [N] each.

    reasons: why an image is left out; None if it is kept. groups: group of near duplicates, or -1.
    """

    keep: NDArray[np.bool_]
    reasons: NDArray[np.object_]
    groups: NDArray[np.int64]

    @classmethod
    def all_kept(cls, num: int) -> "Decisions":
        reasons: NDArray[np.object_] = np.full(num, None)
        return cls(np.ones(num, np.bool_), reasons, np.full(num, -1, np.int64))

    @classmethod
    def read(cls, path: Path) -> "Decisions":
        """Reads the file that `table` was written to."""
        table = pq.read_table(path, schema=SELECTION_SCHEMA)
        reasons: NDArray[np.object_] = table["reason"].to_numpy()
        groups = pc.fill_null(table["group"], -1).to_numpy()
        return cls(table["keep"].to_numpy(), reasons, groups)

    @property
    def left(self) -> NDArray[np.int64]:
        """Returns the ids of the rows that are still kept."""
        return np.flatnonzero(self.keep)

    def leave_out(self, rows: NDArray[np.integer], reason: str) -> None:
        """Leaves out the given rows; a row that was left out before keeps its reason."""
        rows = rows[self.keep[rows]]
        self.keep[rows], self.reasons[rows] = False, reason

    def facts(self) -> dict[str, int]:
        """Returns the numbers of images, groups, kept images, and images left out per reason."""
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
