"""Embeddings to the Centers artifact."""

from pathlib import Path
from typing import Any

import numpy as np

from mlcd.artifact import Artifact, Draft, Request, find_published
from mlcd.clustering.centers import Centers, majority_names
from mlcd.clustering.kmeans import KMeansResult, kmeans
from mlcd.clustering.quality import imbalance, normalized_mutual_information, purity
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.errors import InvalidInput
from mlcd.progress import Reporter
from mlcd.types import Embeddings, unit_rows


def cluster(
    embeddings: EmbeddingsArtifact,
    out: Path,
    *,
    num_clusters: int,
    iterations: int,
    seed: int,
    hold_out: float,
    subtract_mean: bool,
    attach_names: bool,
    reporter: Reporter,
) -> Artifact:
    """Spherical k-means of the rows that are not held out.

    subtract_mean: compare embeddings after subtracting the mean of the clustered rows; the mean becomes part
    of the centers. attach_names: name each center by the majority of its members' known classes; names are
    for people, they never reach training.
    """
    request = Request(
        "centers",
        {
            "num_clusters": num_clusters,
            "iterations": iterations,
            "seed": seed,
            "hold_out": hold_out,
            "subtract_mean": subtract_mean,
            "names": attach_names,
        },
        (embeddings.artifact.as_parent_of(out, "embeddings"),),
        embeddings.fingerprint,
    )
    if (done := find_published(out, request)) is not None:
        return done
    kept = ~embeddings.held_out(hold_out)
    if num_clusters > kept.sum():
        raise InvalidInput(
            f"{num_clusters} clusters were asked of {kept.sum()} embeddings",
            remedy=f"ask for at most {kept.sum()} clusters",
        )
    with Draft(out, request) as draft:
        blocks = [block[kept[start : start + len(block)]] for start, block in embeddings.blocks()]
        blocks = [block for block in blocks if len(block)]
        mean = _mean(blocks) if subtract_mean else None
        if mean is not None:
            if all(np.allclose(block, mean, atol=1e-6) for block in blocks):
                raise InvalidInput(
                    "the images are all alike", remedy="give different ones: there is nothing to cluster"
                )
            blocks = [unit_rows(block - mean) for block in blocks]
        with reporter.stage("cluster", iterations) as meter:
            result = kmeans(
                blocks,
                num_clusters,
                iterations=iterations,
                seed=seed,
                on_iteration=lambda objective: meter.advance(1, objective=objective),
            )
        class_names = [name for name, keep in zip(embeddings.class_names, kept, strict=True) if keep]
        names = majority_names(result.assignment, class_names, num_clusters) if attach_names else None
        Centers(result.centers, result.sizes, embeddings.fingerprint, names, mean).write(draft)
        return draft.publish(summary=_summary(result, class_names))


def _mean(blocks: list[Embeddings]) -> np.ndarray:
    total = sum((block.sum(axis=0, dtype=np.float64) for block in blocks), np.zeros(blocks[0].shape[1]))
    mean: np.ndarray = (total / sum(len(block) for block in blocks)).astype(np.float32)
    return mean


def _summary(result: KMeansResult, class_names: list[str | None]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "rows": len(result.assignment),
        "clusters": len(result.centers),
        "objective": result.objective[-1],
        "objective_history": list(result.objective),
        "imbalance": imbalance(result.sizes),
        "smallest": int(result.sizes.min()),
        "largest": int(result.sizes.max()),
        "splits": result.num_splits,
    }
    known = [row for row, name in enumerate(class_names) if name is not None]
    if known:
        classes = [str(class_names[row]) for row in known]
        summary["purity"] = purity(result.assignment[known], classes)
        summary["nmi"] = normalized_mutual_information(result.assignment[known], classes)
    return summary
