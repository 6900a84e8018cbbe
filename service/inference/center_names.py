"""The names of the served centers in memory, with the alternates and evidence of a naming."""

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
_SEPARATOR: Final = "\n"  # not part of any name, so that a query cannot match across two names


@dataclass(frozen=True)
class CenterNames:
    """The names of all centers at one moment.

    offered: for each center, the names that its evidence supports; empty without evidence. version:
    number of changes so far. grounds: evidence of each center as JSON; empty without evidence.
    """

    names: Names
    offered: Alternates
    version: int = 0
    grounds: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, artifact: Artifact, center_names: GivenNames) -> "CenterNames":
        """Reads the evidence of the names."""
        clusters = (
            read_evidence(artifact, center_names.evidence).clusters if center_names.evidence else []
        )
        # JSON text takes a fraction of the memory of dictionaries
        grounds = tuple(json.dumps(cluster, ensure_ascii=False).encode() for cluster in clusters)
        return cls(center_names.names, _collect_alternates(clusters), center_names.version, grounds)

    def alternates(self, center: int) -> list[str]:
        """Returns the names that a center's evidence supports, except its current name."""
        offered = self.offered[center] if self.offered else ()
        return [name for name in offered if name != self.names[center]]

    def evidence(self, center: int) -> dict[str, Any] | None:
        """Returns the evidence for a center's name; None without evidence."""
        return json.loads(self.grounds[center]) if self.grounds else None

    @cached_property
    def folded(self) -> list[str]:
        """Returns the case-folded name of each center; empty for centers without a name."""
        return [(name or "").casefold() for name in self.names]

    @cached_property
    def searched(self) -> list[str]:
        """Returns the case-folded name and alternates of each center, joined by _SEPARATOR."""
        if not self.offered:
            return self.folded
        return [
            _SEPARATOR.join([name, *map(str.casefold, offered)])
            for name, offered in zip(self.folded, self.offered, strict=True)
        ]

    @cached_property
    def ranks(self) -> NDArray[np.float64]:
        """Returns the rank of each center's name in alphabetical order, NaN without a name."""
        names = self.folded
        ranks = np.full(len(names), np.nan)
        for rank, center in enumerate(sorted(range(len(names)), key=names.__getitem__)):
            if names[center]:
                ranks[center] = rank
        return ranks

    def since(self, center_names: GivenNames) -> "CenterNames":
        """Returns the names after a user's change; the evidence stays the same."""
        return replace(self, names=center_names.names, version=center_names.version)


def _collect_alternates(clusters: list[dict[str, Any]]) -> Alternates:
    """Returns name and alternates of each center, nothing for centers that evidence cannot name."""
    return tuple(
        () if cluster["name"] is None else (cluster["name"], *cluster["alternates"])
        for cluster in clusters
    )
