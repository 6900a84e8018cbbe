"""The names of the served centers: read with the centers, changed one by one, durable at once."""

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.given_names import (
    GIVEN_NAMES,
    Names,
    change_names,
    current_names,
)
from mlcd.artifacts.manifest import Artifact
from mlcd.artifacts.name_evidence import read_evidence
from mlcd.errors import Conflict

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
    def read(cls, artifact: Artifact) -> "CenterNames":
        given = current_names(artifact)
        clusters = read_evidence(artifact, given.evidence).clusters if given.evidence else []
        # text takes a fraction of the memory of its dictionaries
        grounds = tuple(json.dumps(cluster, ensure_ascii=False).encode() for cluster in clusters)
        return cls(given.names, _offered(clusters), given.version, grounds)

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
        return replace(self, names=given.names, version=given.version)


def names_version(artifact: Artifact) -> tuple[int, int] | None:
    """Returns what changes whenever the file of given names does; None where there is none."""
    try:
        found = (artifact.path / GIVEN_NAMES).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _offered(clusters: list[dict[str, Any]]) -> Alternates:
    """Returns the names and alternates of those centers whose evidence is strong enough."""
    return tuple(
        () if cluster["name"] is None else (cluster["name"], *cluster["alternates"])
        for cluster in clusters
    )
