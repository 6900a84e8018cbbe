"""The names of the served centers in memory, with what evidence offers beside them."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.given_names import GivenNames, Names
from mlcd.artifacts.manifest import Artifact
from mlcd.artifacts.name_evidence import read_evidence

Alternates = tuple[tuple[str, ...], ...]
_SEPARATOR: Final = "\n"  # no name holds it, so no part of a query fits across two names


@dataclass(frozen=True)
class CenterNames:
    """The names of all centers at one moment, and those that evidence offers beside them.

    version: the number of changes that led here. grounds: the evidence for each, as JSON; empty
    where there is none.
    """

    names: Names
    offered: Alternates
    version: int = 0
    grounds: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, artifact: Artifact, center_names: GivenNames) -> "CenterNames":
        """Reads the evidence for these names."""
        clusters = (
            read_evidence(artifact, center_names.evidence).clusters if center_names.evidence else []
        )
        # text takes a fraction of the memory of its dictionaries
        grounds = tuple(json.dumps(cluster, ensure_ascii=False).encode() for cluster in clusters)
        return cls(center_names.names, _collect_alternates(clusters), center_names.version, grounds)

    def alternates(self, center: int) -> list[str]:
        """Returns what evidence offers for a center beside the name that it has."""
        offered = self.offered[center] if self.offered else ()
        return [name for name in offered if name != self.names[center]]

    def evidence(self, center: int) -> dict[str, Any] | None:
        """Returns the evidence for a center's name; None where there is none."""
        return json.loads(self.grounds[center]) if self.grounds else None

    @cached_property
    def folded(self) -> list[str]:
        """Returns the name of each center for comparisons without case; empty where it has none."""
        return [(name or "").casefold() for name in self.names]

    @cached_property
    def searched(self) -> list[str]:
        """Returns the name of each center and its alternates, for comparisons without case."""
        if not self.offered:
            return self.folded
        return [
            _SEPARATOR.join([name, *map(str.casefold, offered)])
            for name, offered in zip(self.folded, self.offered, strict=True)
        ]

    @cached_property
    def ranks(self) -> NDArray[np.float64]:
        """Returns the place of each center's name among all in order, NaN where it has none."""
        names = self.folded
        ranks = np.full(len(names), np.nan)
        for rank, center in enumerate(sorted(range(len(names)), key=names.__getitem__)):
            if names[center]:
                ranks[center] = rank
        return ranks

    def since(self, center_names: GivenNames) -> "CenterNames":
        """Returns the names after a change by people, which leaves the evidence as it is."""
        return replace(self, names=center_names.names, version=center_names.version)


def _collect_alternates(clusters: list[dict[str, Any]]) -> Alternates:
    """Returns the names and alternates of those centers whose evidence is strong enough."""
    return tuple(
        () if cluster["name"] is None else (cluster["name"], *cluster["alternates"])
        for cluster in clusters
    )
