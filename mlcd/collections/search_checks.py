"""Checks of the arguments that create or search a collection, the same for every store."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, Conflict, InvalidInput
from mlcd.indexes.tuning import LARGEST_TARGET
from mlcd.types import Embeddings, Fingerprint, unit_rows

MAX_TOP: Final = 10_000
# bound on the rounding of a squared norm in float32, for any dimension
_UNIT_ROUNDING: Final = 1e-5


def check_creation(dimension: int, recall: float) -> None:
    """Raises ConfigInvalid if the dimension or the target recall is out of range."""
    if not 0 < recall <= LARGEST_TARGET:
        raise ConfigInvalid(
            f"recall must be in (0, {LARGEST_TARGET:g}], got {recall:g}",
            remedy="request exact searches to find all neighbors",
        )
    if dimension < 1:
        raise ConfigInvalid(f"dimension must be at least 1, got {dimension}")


def check_same(
    name: str,
    own: tuple[Fingerprint, int, float],
    requested: tuple[Fingerprint, int, float | None],
) -> None:
    """Raises Conflict if an existing collection differs from the requested one.

    own, requested: (fingerprint, dimension, recall); a requested recall of None matches any.
    """
    remedy = "give another name, or delete it first"
    if own[:2] != requested[:2]:
        raise Conflict(
            f"the collection {name} exists, with embeddings of dimension {own[1]} by the model"
            f" {own[0]}",
            remedy=remedy,
        )
    if requested[2] not in (None, own[2]):
        raise Conflict(f"the collection {name} exists, with recall {own[2]:g}", remedy=remedy)


def check_model(name: str, own: Fingerprint, fingerprint: Fingerprint) -> None:
    """Raises ConfigInvalid if the collection has embeddings of another model."""
    if fingerprint != own:
        raise ConfigInvalid(
            f"{name} requires embeddings of the model {own[:12]}, got {fingerprint[:12]}",
            remedy="embed the images with the collection's model, or make another collection",
        )


def check_queries(
    queries: NDArray[np.floating], top: int, threshold: float | None, dimension: int
) -> Embeddings:
    """Returns the queries as unit rows. Raises InvalidInput naming the invalid argument."""
    if not isinstance(top, int) or not 1 <= top <= MAX_TOP:
        raise InvalidInput(f"top must be in 1 to {MAX_TOP}, got {top!r}")
    if threshold is not None and not -1 <= threshold <= 1:
        raise InvalidInput(f"the threshold must be a cosine in [-1, 1], got {threshold:g}")
    if queries.ndim != 2 or queries.shape[1] != dimension:
        raise InvalidInput(f"the collection has dimension {dimension}, got {list(queries.shape)}")
    return _unit(queries)


def _unit(queries: NDArray[np.floating]) -> Embeddings:
    """Returns unit rows; float32 rows of norm 1, such as our encoders return, stay bit for bit."""
    if (
        queries.dtype == np.float32
        and (np.abs(np.einsum("qd,qd->q", queries, queries) - 1) <= _UNIT_ROUNDING).all()
    ):
        return np.ascontiguousarray(queries)
    return unit_rows(queries)
