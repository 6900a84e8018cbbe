"""Compares the rows of an int8 graph with those of fp32, before the graph is published."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.clustering.nearest import nearest_centers
from mlcd.errors import ConfigInvalid
from mlcd.types import Embeddings

MIN_MEAN_COSINE: Final = 0.99
NEAREST_IMAGE: Final = "the nearest other image"


@dataclass(frozen=True)
class Int8Agreement:
    """The agreement of an int8 graph with fp32, on `num` images that did not calibrate it.

    mean_cosine, min_cosine: cosine of an image's int8 row and fp32 row. same_label: fraction of
    images with the same label by both. label_kind: meaning of a label, as text for reports: "the
    nearest other image" or "the nearest of K centers".
    """

    mean_cosine: float
    min_cosine: float
    same_label: float
    label_kind: str
    num: int

    @classmethod
    def from_manifest(cls, summary: Mapping[str, Any]) -> "Int8Agreement":
        """Reads the fields of `summary()` from a manifest's summary."""
        names = ("mean_cosine", "min_cosine", "same_label", "labels", "held_out_images")
        return cls(*(summary[f"int8_{name}"] for name in names))

    def summary(self) -> dict[str, Any]:
        """Returns the fields for the manifest."""
        return {
            "int8_mean_cosine": self.mean_cosine,
            "int8_min_cosine": self.min_cosine,
            "int8_same_label": self.same_label,
            "int8_labels": self.label_kind,
            "int8_held_out_images": self.num,
        }

    def check(self, name: str, min_mean: float = MIN_MEAN_COSINE) -> None:
        """Raises ConfigInvalid if the mean cosine is below `min_mean`."""
        if not self.mean_cosine >= min_mean:
            raise ConfigInvalid(
                f"int8 changes {name} too much: the mean cosine to fp32 must be at least"
                f" {min_mean}, got {self.mean_cosine:.6f} on {self.num} held-out images",
                remedy="nothing was written; use fp32 or bf16, or calibrate on more images that"
                " resemble the images to embed",
            )


def compare_rows(
    fp32_rows: Embeddings, int8_rows: Embeddings, centers: Centers | None
) -> Int8Agreement:
    """Compares the unit rows [N, D] of the same images in fp32 and int8.

    The label of an image is its nearest center; without centers, its nearest other image.
    """
    cosines = (fp32_rows.astype(np.float64) * int8_rows.astype(np.float64)).sum(axis=1)
    if centers is None:
        label_kind = NEAREST_IMAGE
        has_same_label = _find_nearest_images(fp32_rows) == _find_nearest_images(int8_rows)
    else:
        label_kind = f"the nearest of {len(centers.vectors)} centers"
        has_same_label = _find_nearest_centers(fp32_rows, centers) == _find_nearest_centers(
            int8_rows, centers
        )
    return Int8Agreement(
        float(cosines.mean()),
        float(cosines.min()),
        float(has_same_label.mean()),
        label_kind,
        len(fp32_rows),
    )


def _find_nearest_centers(rows: Embeddings, centers: Centers) -> NDArray[np.integer]:
    return nearest_centers(centers.align(rows), centers.vectors, top=1).ids[:, 0]


def _find_nearest_images(rows: Embeddings) -> NDArray[np.intp]:
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    nearest: NDArray[np.intp] = cosines.argmax(axis=1)
    return nearest
