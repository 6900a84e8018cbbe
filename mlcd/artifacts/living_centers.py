"""Centers that were changed after clustering: a Centers artifact with a journal of the changes.

Rows are never removed or reordered, so an id keeps its meaning from one artifact to the next.

quantiles.npy   the distance that contains a given fraction of each cluster's original members;
                the first change sets the fraction
clusters.npy    the cluster of each center: its own id, unless clusters were merged or aligned
journal.json    the digest of the original centers and, for each change since, its fields, with the
                digests of the embeddings it used and of the artifact it made
"""

import json
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Artifact

JOURNAL: Final = "journal.json"


@dataclass(frozen=True)
class ChangeJournal:
    """The changes since the centers with the digest `origin`.

    steps: fields of each change. made: digests of the artifacts of all changes except the last.
    """

    origin: str
    steps: tuple[dict[str, Any], ...] = ()
    made: tuple[str, ...] = ()

    def then(self, before: Artifact, step: dict[str, Any]) -> "ChangeJournal":
        """Returns the journal extended by one step. before: the artifact that the step changes."""
        digests = (*self.made, before.digest) if self.steps else ()
        return ChangeJournal(self.origin, (*self.steps, step), digests)


@dataclass(frozen=True)
class LivingCenters:
    """Centers, their quantiles (NaN if never measured), their clusters and the journal."""

    centers: Centers
    quantiles: NDArray[np.float32]
    clusters: NDArray[np.int32]
    journal: ChangeJournal

    @classmethod
    def read(cls, artifact: Artifact) -> "LivingCenters":
        """Reads changed centers, or centers of `mlcd cluster`."""
        stored_centers = Centers.read(artifact)
        # `write` puts quantiles and clusters back; levels (paths) do not survive a change
        centers = replace(stored_centers, quantiles=None, clusters=None, paths=None)
        num = len(centers.vectors)
        if JOURNAL not in artifact.files:
            quantiles = np.full(num, np.nan, np.float32)
            return cls(
                centers, quantiles, np.arange(num, dtype=np.int32), ChangeJournal(artifact.digest)
            )
        assert stored_centers.quantiles is not None
        assert stored_centers.clusters is not None
        stored = json.loads(artifact.file(JOURNAL).read_text())
        return cls(
            centers,
            stored_centers.quantiles,
            stored_centers.clusters,
            ChangeJournal(stored["origin"], tuple(stored["steps"]), tuple(stored["made"])),
        )

    def write(self, draft: Draft) -> None:
        replace(self.centers, quantiles=self.quantiles, clusters=self.clusters).write(draft)
        draft.write_json(
            JOURNAL,
            {
                "origin": self.journal.origin,
                "steps": list(self.journal.steps),
                "made": list(self.journal.made),
            },
        )
