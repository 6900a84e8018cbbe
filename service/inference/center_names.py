"""The names of the served centers: read with the centers, changed one by one, durable at once."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.given_names import GivenNames, Names, change_names, current_names
from mlcd.artifacts.manifest import Artifact
from mlcd.artifacts.name_evidence import read_evidence
from mlcd.errors import Conflict

Alternates = tuple[tuple[str, ...], ...]
_SEPARATOR: Final = "\n"  # no name holds it, so no part of a query fits across two names


@dataclass(frozen=True)
class CenterNames:
    """The names of all centers at one moment, and those that evidence offers beside them.

    version: the number of changes that led here.
    """

    names: Names
    offered: Alternates
    version: int = 0

    @classmethod
    def read(cls, artifact: Artifact) -> "CenterNames":
        given = current_names(artifact)
        return cls(given.names, _offered(artifact, given), given.version)

    def alternates(self, center: int) -> list[str]:
        """Returns what evidence offers for a center beside the name that it has."""
        offered = self.offered[center] if self.offered else ()
        return [name for name in offered if name != self.names[center]]

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

    def changed(self, artifact: Artifact, center: int, name: str | None) -> "CenterNames":
        """Gives a center a name, or takes it away, and returns the names since.

        They are on the disk then. Raises Conflict where nothing can be written beside the centers.
        """
        if not os.access(artifact.path, os.W_OK):
            raise Conflict(
                "the centers of this server can only be read",
                remedy="let the server write into their folder",
            )
        _, given = change_names(artifact, lambda before: before.set_by_hand({center: name}))
        return CenterNames(given.names, self.offered, given.version)


def _offered(artifact: Artifact, given: GivenNames) -> Alternates:
    """Returns the names and alternates of those centers whose evidence is strong enough."""
    if given.evidence is None:
        return ()
    clusters = read_evidence(artifact, given.evidence).clusters
    return tuple(
        () if cluster["name"] is None else (cluster["name"], *cluster["alternates"])
        for cluster in clusters
    )
