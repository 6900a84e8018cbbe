"""Names the centers of a clustering, by hand or from evidence."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.given_names import GivenNames, change_names, read_names_file
from mlcd.artifacts.manifest import Artifact, open_artifact
from mlcd.artifacts.name_evidence import NameEvidence, write_evidence
from mlcd.clustering.nearest import CenterScan
from mlcd.errors import InvalidInput
from mlcd.naming.chosen_names import SHUFFLES, ClusterName, name_clusters
from mlcd.naming.term_scores import Score
from mlcd.naming.terms import MemberTerms


@dataclass(frozen=True)
class Naming:
    """The result of naming centers.

    num_changed: number of centers whose name changed. num_named: number of centers with a name.
    evidence: name of the file with the reasons; None without.
    """

    digest: str
    num_changed: int
    num_named: int
    num_centers: int
    evidence: str | None = None


@dataclass(frozen=True)
class Members:
    """Members of clusters, with the terms that can become names.

    terms: terms of N members. assignment: int [N], center of each member. score: function that
    scores terms. made_of: facts that identify the input, for the evidence. shown: what the evidence
    shows of each member, or None.
    """

    terms: MemberTerms
    assignment: NDArray[np.integer]
    score: Score
    made_of: Mapping[str, Any]
    shown: list[dict[str, str]] | None = None


def set_names(path: Path, file: Path) -> Naming:
    """Gives centers at `path` the names in `file`; centers not in the file keep their names."""
    artifact, centers = open_centers(path)
    changes = read_names_file(file, len(centers.sizes), digest=artifact.digest)
    return _summarize_change(
        artifact, *change_names(artifact, lambda names: names.set_by_hand(changes))
    )


def name_members(path: Path, members: Members, *, least_share: float) -> Naming:
    """Names the centers at `path` by their members; names that users gave stay.

    Writes the evidence, then the names, which refer to it. The same members give the same bytes.
    """
    artifact, centers = open_centers(path)
    _check_least_share(least_share)
    cluster_names = name_clusters(
        members.terms,
        members.assignment,
        nearest_others(centers),
        members.score,
        least_share=least_share,
    )
    made_of = {**members.made_of, "least_share": least_share, "shuffles": SHUFFLES}
    evidence = NameEvidence(
        made_of, [_to_record(cluster_name, members.shown) for cluster_name in cluster_names]
    )
    file = write_evidence(artifact, evidence)
    return _summarize_change(
        artifact, *change_names(artifact, lambda names: names.set_from(file, evidence.names))
    )


def open_centers(path: Path) -> tuple[Artifact, Centers]:
    artifact = open_artifact(path, "centers")
    return artifact, Centers.read(artifact)


def _summarize_change(artifact: Artifact, before: GivenNames, after: GivenNames) -> Naming:
    return Naming(
        artifact.digest,
        sum(old != new for old, new in zip(before.names, after.names, strict=True)),
        sum(name is not None for name in after.names),
        len(after.names),
        after.evidence,
    )


def _check_least_share(least_share: float) -> None:
    if not 0 <= least_share <= 1:
        raise InvalidInput(f"the least share must be in [0, 1], got {least_share:g}")


def nearest_others(centers: Centers) -> NDArray[np.int64]:
    """Returns the nearest other center of each center, [K]; -1 if there is only one center."""
    num = len(centers.vectors)
    center_ids = CenterScan(centers.vectors).nearest(centers.vectors, 2).ids
    is_self = center_ids == np.arange(num)[:, None]
    is_self[~is_self.any(axis=1), 1] = True  # centers with equal vectors and lower ids came first
    nearest: NDArray[np.int64] = center_ids[~is_self].astype(np.int64)
    return nearest


def _to_record(cluster_name: ClusterName, shown: list[dict[str, str]] | None) -> dict[str, Any]:
    """Returns the evidence for a name as a record of the evidence file."""
    record = asdict(cluster_name)
    typical = record.pop("typical")
    if shown is not None:
        record["typical"] = [shown[member] for member in typical]
    return record
