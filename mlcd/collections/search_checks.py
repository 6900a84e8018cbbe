"""The checks of what a collection is created for or searched by, the same for every store."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, Conflict, InvalidInput
from mlcd.indexes.tuning import LARGEST_TARGET
from mlcd.types import Embeddings, Fingerprint, unit_rows

MAX_TOP: Final = 10_000
# rounding of a squared norm in float32, whatever the dimension
_UNIT_ROUNDING: Final = 1e-5


def check_creation(dimension: int, recall: float) -> None:
    """Raises ConfigInvalid where no collection can be of this dimension and recall."""
    if not 0 < recall <= LARGEST_TARGET:
        raise ConfigInvalid(
            f"a recall of {recall:g} cannot be shown",
            remedy=f"give one in (0, {LARGEST_TARGET:g}], or search exact",
        )
    if dimension < 1:
        raise ConfigInvalid(f"{dimension} is no dimension")


def check_same(
    name: str,
    held: tuple[Fingerprint, int, float],
    wanted: tuple[Fingerprint, int, float | None],
) -> None:
    """Raises Conflict where a collection is there for another (fingerprint, dimension, recall).

    wanted: without a recall, that of the collection will do.
    """
    remedy = "give another name, or delete it first"
    if held[:2] != wanted[:2]:
        raise Conflict(
            f"the collection {name} is there, for embeddings of {held[1]} numbers by the model"
            f" {held[0]}",
            remedy=remedy,
        )
    if wanted[2] not in (None, held[2]):
        raise Conflict(
            f"the collection {name} is there, for a recall of {held[2]:g}", remedy=remedy
        )


def check_model(name: str, held: Fingerprint, given: Fingerprint) -> None:
    """Raises ConfigInvalid where embeddings of the given model do not belong in the collection."""
    if given != held:
        raise ConfigInvalid(
            f"{name} holds embeddings of another model ({held[:12]}, given {given[:12]})",
            remedy="embed the images with the collection's model, or make another collection",
        )


def checked_queries(
    queries: NDArray[np.floating], top: int, threshold: float | None, dimension: int
) -> Embeddings:
    """Returns the queries as unit rows. Raises InvalidInput naming what is wrong with a search."""
    if not isinstance(top, int) or not 1 <= top <= MAX_TOP:
        raise InvalidInput(f"top is not in 1 to {MAX_TOP}")
    if threshold is not None and not -1 <= threshold <= 1:
        raise InvalidInput("the threshold is no cosine", remedy="give one in [-1, 1]")
    if queries.ndim != 2 or queries.shape[1] != dimension:
        raise InvalidInput(f"the collection has dimension {dimension}, got {list(queries.shape)}")
    return _unit(queries)


def _unit(queries: NDArray[np.floating]) -> Embeddings:
    """Returns unit rows; rows that are of unit length already, as our encoders give them, stay as
    they are.
    """
    if (
        queries.dtype == np.float32
        and (np.abs(np.einsum("qd,qd->q", queries, queries) - 1) <= _UNIT_ROUNDING).all()
    ):
        return np.ascontiguousarray(queries)
    return unit_rows(queries)
