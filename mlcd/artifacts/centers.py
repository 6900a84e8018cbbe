"""The Centers artifact; label ids are indices of its rows.

centers.npy     float32 [k, d], unit rows
sizes.npy       int64 [k], training members of each center
names.json      optional: a name for each center, or null; `mlcd.artifacts.given_names` has the
                names that users give
mean.npy        optional: float32 [d], subtracted from unit embeddings (which are then
                normalized again) before they are compared with the centers; for encoders
                whose features lie in a narrow cone
examples.arrow  optional: the keys of a few members of each center, see
                `mlcd.artifacts.examples`
audit.npy       optional: float16 [n, d], unit embeddings of the model, to measure the recall
                of approximate look-ups
quantiles.npy   optional: float32 [k], the distance (1 - cosine) within which a fraction of each
                cluster's members lies: 95 %; a later change of the centers can set another
clusters.npy    optional: int32 [k], the cluster of each center, after changes of the centers,
                see `mlcd.artifacts.living_centers`
levels.parquet  optional: the coarser levels, see `mlcd.artifacts.center_levels`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.artifacts.center_levels import read_paths
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.examples import EXAMPLES, Examples
from mlcd.artifacts.given_names import ORIGINAL_NAMES, original_names, read_given_names
from mlcd.artifacts.manifest import Artifact, open_artifact
from mlcd.errors import ArtifactInvalid
from mlcd.types import Embeddings, Fingerprint, ShortRepr, unit_rows

VECTORS: Final = "centers.npy"
AUDIT_ROWS: Final = "audit.npy"
QUANTILES: Final = "quantiles.npy"
CLUSTERS: Final = "clusters.npy"
_Number = TypeVar("_Number", np.float32, np.float16, np.int32)
_PER_CENTER: Final = ("sizes", "names", "examples", "quantiles", "clusters", "paths")


@dataclass(frozen=True, repr=False)
class Centers(ShortRepr):
    """The unit class centers in the space of one model.

    clusters: cluster of each center; None if each center is its own cluster. paths: path of each
    center through the levels, such as "4/17/2031"; None without levels.
    """

    vectors: Embeddings
    sizes: NDArray[np.int64]
    fingerprint: Fingerprint
    names: tuple[str | None, ...] | None = None
    mean: NDArray[np.float32] | None = None
    examples: Examples | None = None
    # embeddings of the model, drawn by hash, if possible ones that the centers were not fitted on
    audit_rows: NDArray[np.float16] | None = None
    quantiles: NDArray[np.float32] | None = None
    clusters: NDArray[np.int32] | None = None
    paths: tuple[str, ...] | None = None
    # identity of the artifact; empty until published
    digest: str = ""

    def __post_init__(self) -> None:
        num, dimension = self.vectors.shape
        if self.mean is not None and self.mean.shape != (dimension,):
            raise ArtifactInvalid(
                f"the mean must have the shape [{dimension}], got {list(self.mean.shape)}"
            )
        for field in _PER_CENTER:
            if (values := getattr(self, field)) is not None and len(values) != num:
                raise ArtifactInvalid(
                    f"{field} must have {num} values, one per center, got {len(values)}"
                )
        if self.audit_rows is not None and self.audit_rows.shape[1:] != (dimension,):
            raise ArtifactInvalid(
                f"audit rows must have the dimension {dimension} of the centers, got the shape"
                f" {list(self.audit_rows.shape)}"
            )

    def align(self, embeddings: Embeddings) -> Embeddings:
        """Returns unit embeddings in the space of the centers: minus the mean, if there is one."""
        return embeddings if self.mean is None else unit_rows(embeddings - self.mean)

    def name(self, center: int) -> str | None:
        return None if self.names is None else self.names[center]

    def cluster(self, center: int) -> int:
        """Returns the cluster that a center belongs to."""
        return center if self.clusters is None else int(self.clusters[center])

    def path(self, center: int) -> str | None:
        return None if self.paths is None else self.paths[center]

    @cached_property
    def label_columns(self) -> dict[str, pa.Array]:
        """Returns the further columns of labels, beside ids and scores: a value per center."""
        columns = {}
        if self.clusters is not None:
            columns["clusters"] = pa.array(self.clusters)
        if self.paths is not None:
            columns["paths"] = pa.array(self.paths, pa.string())
        return columns

    def write(self, draft: Draft) -> None:
        """Writes everything except the levels."""
        arrays: dict[str, NDArray[Any] | None] = {
            VECTORS: self.vectors,
            "sizes.npy": self.sizes,
            "mean.npy": self.mean,
            AUDIT_ROWS: self.audit_rows,
            QUANTILES: self.quantiles,
            CLUSTERS: self.clusters,
        }
        for name, array in arrays.items():
            if array is None:
                continue
            with draft.write(name) as path, path.open("wb") as file:
                np.save(file, array, allow_pickle=False)
        if self.names is not None:
            draft.write_json(ORIGINAL_NAMES, list(self.names))
        if self.examples is not None:
            with draft.write(EXAMPLES) as path:
                self.examples.write(path)

    @classmethod
    def open(cls, path: Path) -> "Centers":
        return cls.read(open_artifact(path, "centers"))

    @classmethod
    def read(
        cls, artifact: Artifact, *, mapped: bool = False, with_names: bool = True
    ) -> "Centers":
        """Reads the centers.

        mapped: whether to memory-map the vectors. with_names: whether to read the names that users
        gave; otherwise only the original names.
        """
        if artifact.fingerprint is None:
            raise ArtifactInvalid(
                f"{artifact.path} must name its model by a fingerprint", remedy="cluster again"
            )

        def load(name: str, mode: Literal["r"] | None = None) -> NDArray[np.generic]:
            array: NDArray[np.generic] = np.load(artifact.file(name), mode, allow_pickle=False)
            return array

        def optional(name: str, dtype: type[_Number]) -> NDArray[_Number] | None:
            return load(name).astype(dtype) if name in artifact.files else None

        sizes = load("sizes.npy").astype(np.int64)
        given_names = read_given_names(artifact, len(sizes)) if with_names else None
        names = original_names(artifact) if given_names is None else given_names.names
        return cls(
            vectors=load(VECTORS, "r" if mapped else None).astype(np.float32, copy=not mapped),
            sizes=sizes,
            fingerprint=artifact.fingerprint,
            names=names,
            mean=optional("mean.npy", np.float32),
            examples=Examples.open(artifact.file(EXAMPLES)) if EXAMPLES in artifact.files else None,
            audit_rows=optional(AUDIT_ROWS, np.float16),
            quantiles=optional(QUANTILES, np.float32),
            clusters=optional(CLUSTERS, np.int32),
            paths=read_paths(artifact),
            digest=artifact.digest,
        )


def majority_names(
    assignment: NDArray[np.int32], class_names: Sequence[str | None], num_centers: int
) -> tuple[str | None, ...]:
    """Returns the most frequent known class among each center's members; ties go to the
    alphabetically first.
    """
    counts: list[dict[str, int]] = [{} for _ in range(num_centers)]
    for center, class_name in zip(assignment, class_names, strict=True):
        if class_name is not None:
            counts[center][class_name] = counts[center].get(class_name, 0) + 1
    return tuple(map(_find_most_frequent, counts))


def _find_most_frequent(counts: dict[str, int]) -> str | None:
    return min(counts, key=lambda name: (-counts[name], name)) if counts else None
