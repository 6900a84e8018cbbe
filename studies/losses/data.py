"""The pre-training set by the product's own commands: `mlcd embed`, `mlcd cluster`, `mlcd label`.

Existing artifacts are kept. A fifth of each class, by the hash of the key, is left out of
clustering and training.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlcd.artifacts.disk import hold_lock
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import MANIFEST
from mlcd.errors import InvalidInput, NotFound
from mlcd.keys import HELD_OUT_FRACTION
from studies.losses.arms import RunSpec, Variant
from studies.losses.tiers import Tier


@dataclass(frozen=True)
class PretrainingData:
    """The data of pre-training.

    root: the shared data. state: the directory of artifacts.
    """

    root: Path
    state: Path
    tier: Tier

    @property
    def images(self) -> str:
        """The images for `mlcd embed` and the trainer."""
        return str(self.root / self.tier.shards)

    def encoder(self, variant: Variant) -> str:
        """The encoder for `mlcd embed --model`."""
        name = variant.features or self.tier.encoder
        return str(self.root / name) if name.endswith(".onnx") else name

    def embeddings(self, variant: Variant) -> Path:
        return self.state / (
            "embeddings" if variant.features is None else f"embeddings-{variant.features}"
        )

    def centers(self, variant: Variant) -> Path:
        return self.state / f"centers-{self._clustering(variant)}"

    def _clustering(self, variant: Variant) -> str:
        clusters = str(variant.clusters or self.tier.clusters)
        return clusters if variant.features is None else f"{clusters}-{variant.features}"

    def prepare(self, variant: Variant) -> Path:
        """Labels all photographs, `stored_labels` each, and returns the path of the artifact."""
        labels, centers = self.state / f"labels-{self._clustering(variant)}", self.centers(variant)
        embeddings = self.embeddings(variant)
        if (labels / MANIFEST).is_file():
            return labels
        self.state.mkdir(parents=True, exist_ok=True)
        make(embeddings, "embed", self.images, embeddings, "--model", self.encoder(variant))
        clusters = variant.clusters or self.tier.clusters
        options = ("--clusters", clusters, "--subtract-mean", "--hold-out", HELD_OUT_FRACTION)
        make(centers, "cluster", embeddings, centers, *options)
        make(
            labels,
            "label",
            embeddings,
            labels,
            "--centers",
            centers,
            "--top",
            self.tier.stored_labels,
        )
        return labels

    def labels(self, spec: RunSpec) -> Path:
        """Returns the labels of a run; of several runs at a time one makes them, and the others
        wait.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        with hold_lock(self.state / ".making"):
            return self._labels(spec)

    def _labels(self, spec: RunSpec) -> Path:
        labels = self.prepare(spec.variant)
        mean = spec.variant.threshold_mean
        if mean is None:
            return labels
        out = self.state / f"labels-{self._clustering(spec.variant)}-threshold-{mean:g}"
        threshold = _threshold(LabelTable.open(labels), mean)
        options = ("--top", self.tier.stored_labels, "--threshold", threshold)
        make(
            out,
            "label",
            self.embeddings(spec.variant),
            out,
            "--centers",
            self.centers(spec.variant),
            *options,
        )
        return out


def make(artifact: Path, *words: object) -> None:
    """Runs a command of the product unless its artifact exists.

    Raises InvalidInput with the command line if it fails.
    """
    if (artifact / MANIFEST).is_file():
        return
    command = [sys.executable, "-m", "mlcd", *map(str, words)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        lines = finished.stderr.strip().splitlines()
        raise InvalidInput(f"mlcd {words[0]} failed: {lines[-1] if lines else finished.returncode}")


def require(root: Path, names: Sequence[str]) -> None:
    """Raises NotFound if a data set is missing."""
    for name in names:
        if not (root / name).exists():
            raise NotFound(
                f"there is no {name} in {root}",
                remedy="give the folder of the data sets with --data",
            )


def _threshold(table: LabelTable, mean: float) -> float:
    """Returns the cosine that `mean` labels of an image reach on average, to two decimals."""
    scores = np.concatenate([part.astype(np.float64) for part in _scores(table)])
    wanted = round(mean * len(table.keys))
    return round(float(np.sort(scores)[-wanted]), 2)


def _scores(table: LabelTable) -> list[np.ndarray]:
    import pyarrow.parquet as pq

    parts = sorted(table.artifact.path.glob("part-*.parquet"))
    return [
        pq.read_table(part, columns=["scores"])["scores"].combine_chunks().flatten().to_numpy()
        for part in parts
    ]
