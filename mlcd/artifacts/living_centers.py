"""Centers that were changed since they were clustered, with the journal of the changes.

A Centers artifact with a journal. Its rows are never taken away and never change places, so an id
keeps its meaning from one artifact to the next.

quantiles.npy   the distance within which the share of each cluster's first members lay that the
                first change asked for
clusters.npy    the cluster of each center; its own id but where clusters were merged or aligned
journal.json    the digest of the first centers and, for each step since, what was done, with the
                digests of the embeddings it used and of the artifact that it made
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
    """The steps from the centers of digest `origin` on.

    steps: each with its fields. made: the digests of the artifacts of all steps but the last.
    """

    origin: str
    steps: tuple[dict[str, Any], ...] = ()
    made: tuple[str, ...] = ()

    def then(self, before: Artifact, step: dict[str, Any]) -> "ChangeJournal":
        """Returns the journal with one more step, which changed the artifact `before`."""
        digests = (*self.made, before.digest) if self.steps else ()
        return ChangeJournal(self.origin, (*self.steps, step), digests)


@dataclass(frozen=True)
class LivingCenters:
    """Centers, the quantile of each (NaN where it was never measured) and the cluster of each."""

    centers: Centers
    quantiles: NDArray[np.float32]
    clusters: NDArray[np.int32]
    journal: ChangeJournal

    @classmethod
    def read(cls, artifact: Artifact) -> "LivingCenters":
        """Reads centers that were changed, or that `mlcd cluster` made."""
        all_centers = Centers.read(artifact)
        # a change replaces these
        centers = replace(all_centers, quantiles=None, clusters=None, paths=None)
        num = len(centers.vectors)
        if JOURNAL not in artifact.files:
            unknown = np.full(num, np.nan, np.float32)
            return cls(
                centers, unknown, np.arange(num, dtype=np.int32), ChangeJournal(artifact.digest)
            )
        assert all_centers.quantiles is not None
        assert all_centers.clusters is not None
        stored = json.loads(artifact.file(JOURNAL).read_text())
        return cls(
            centers,
            all_centers.quantiles,
            all_centers.clusters,
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
