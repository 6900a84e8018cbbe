"""One class center: what it stands for."""

from typing import Annotated, Any

from fastapi import APIRouter, Path

from mlcd.errors import NotFound
from service.api.access import Opened
from service.api.answers import provenance
from service.api.labels import opened_centers

router = APIRouter(tags=["labels"])

_NUM_NEIGHBORS = 8


@router.get("/v1/centers/{center}")
def describe_center(center: Annotated[int, Path(ge=0)], resources: Opened) -> dict[str, Any]:
    """Size, name, the nearest other centers, and the nearest items of each collection as examples."""
    centers, scan = opened_centers(resources)
    if center >= len(centers.vectors):
        raise NotFound(f"there is no center {center}", remedy=f"ids go from 0 to {len(centers.vectors) - 1}")
    vector = centers.vectors[center : center + 1]
    near = scan.nearest(vector, min(_NUM_NEIGHBORS + 1, len(centers.vectors)))
    neighbors = [
        {"id": int(other), "similarity": float(score), "name": centers.name(int(other))}
        for other, score in zip(near.ids[0], near.scores[0], strict=True)
        if other != center
    ]
    examples = [
        {"collection": name, "id": match.key, "similarity": match.similarity}
        for name, snapshot in resources.collections.items()
        # Where centers compare embeddings less their mean, their vectors are not in the items' space.
        if centers.mean is None
        for match in snapshot.search(vector, _NUM_NEIGHBORS)[0]
    ]
    return {
        **provenance(resources),
        "centers": centers.digest,
        "id": center,
        "size": int(centers.sizes[center]),
        "name": centers.name(center),
        "nearest": neighbors[:_NUM_NEIGHBORS],
        "examples": examples,
    }
