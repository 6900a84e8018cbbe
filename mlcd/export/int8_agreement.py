"""The agreement of rows in int8 with those in fp32, by which a graph is judged before it is
published.
"""

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
    """The agreement of a graph in int8, on `num` images on which it was not calibrated.

    mean_cosine, min_cosine: of each image's rows in int8 and fp32. same_label: the share of images
    with the same label in both. labels: what the labels are.
    """

    mean_cosine: float
    min_cosine: float
    same_label: float
    labels: str
    num: int

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> "Int8Agreement":
        """Reads what `summary` wrote into the manifest."""
        names = ("mean_cosine", "min_cosine", "same_label", "labels", "held_out_images")
        return cls(*(summary[f"int8_{name}"] for name in names))

    def summary(self) -> dict[str, Any]:
        """Returns the fields for the manifest."""
        return {
            "int8_mean_cosine": self.mean_cosine,
            "int8_min_cosine": self.min_cosine,
            "int8_same_label": self.same_label,
            "int8_labels": self.labels,
            "int8_held_out_images": self.num,
        }

    def check(self, name: str, least: float = MIN_MEAN_COSINE) -> None:
        """Raises ConfigInvalid where the mean cosine is below `least`."""
        if not self.mean_cosine >= least:
            raise ConfigInvalid(
                f"int8 changes {name} too much: mean cosine {self.mean_cosine:.6f} to fp32 on"
                f" {self.num} held-out images, below {least}",
                remedy="nothing was written; use fp32 or bf16, or calibrate on more images that"
                " are like those to come",
            )


def compare_rows(exact: Embeddings, rounded: Embeddings, centers: Centers | None) -> Int8Agreement:
    """Compares the unit rows [N, D] of images in int8 with those in fp32.

    A label is the nearest of the centers; without centers, the nearest other of the N images.
    """
    cosines = (exact.astype(np.float64) * rounded.astype(np.float64)).sum(axis=1)
    if centers is None:
        labels, has_same_label = NEAREST_IMAGE, _nearest_others(exact) == _nearest_others(rounded)
    else:
        labels = f"the nearest of {len(centers.vectors)} centers"
        has_same_label = _nearest(exact, centers) == _nearest(rounded, centers)
    return Int8Agreement(
        float(cosines.mean()),
        float(cosines.min()),
        float(has_same_label.mean()),
        labels,
        len(exact),
    )


def _nearest(rows: Embeddings, centers: Centers) -> NDArray[np.integer]:
    return nearest_centers(centers.align(rows), centers.vectors, top=1).ids[:, 0]


def _nearest_others(rows: Embeddings) -> NDArray[np.intp]:
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    nearest: NDArray[np.intp] = cosines.argmax(axis=1)
    return nearest
