"""Evaluate several representations under one protocol, and keep the result as an artifact."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlcd.artifact import Artifact, Draft, Parent, Request, find_published
from mlcd.errors import ConfigInvalid
from mlcd.pipelines.embed import images_parent
from mlcd.progress import Reporter
from training.evaluation.knn import clusters, knn
from training.evaluation.representations import Representation, images_of, locate, open_representation

RESULTS = "results.json"


def evaluate_all(
    paths: Sequence[Path],
    settings: dict[str, Any],
    *,
    images: str | None,
    out: Path | None,
    reporter: Reporter,
) -> list[dict[str, Any]]:
    """One record per path: representation, its digest, metrics, and the protocol that gave them."""
    if images is not None and all(locate(path).kind == "embeddings" for path in paths):
        raise ConfigInvalid("--images has no effect on embeddings", remedy="give a checkpoint or a run")
    request = None
    if out is not None:
        parents = tuple(parent for path in paths for parent in _parents(locate(path), out, images))
        request = Request("evaluation", settings, parents)
        if (done := find_published(out, request)) is not None:
            results: list[dict[str, Any]] = json.loads(done.file(RESULTS).read_text())
            return results
    with reporter.stage("evaluate", None) as meter:
        results = [_evaluate(path, settings, images, lambda: meter.advance(1)) for path in paths]
    if out is not None and request is not None:
        with Draft(out, request) as draft:
            draft.write_json(RESULTS, results)
            draft.publish()
    return results


def _evaluate(path: Path, settings: dict[str, Any], images: str | None, on_image: Any) -> dict[str, Any]:
    representation = open_representation(path, images=images, on_image=on_image)
    return {
        "representation": representation.name,
        "digest": representation.artifact.digest,
        "metrics": dict(_metrics(representation, settings)),
        "protocol": settings,
    }


def _metrics(representation: Representation, settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if settings["kind"] == "knn":
        yield from knn(representation, neighbors=settings["neighbors"], hold_out=settings["hold_out"])
    else:
        yield from clusters(representation, seed=settings["seed"])


def _parents(artifact: Artifact, out: Path, images: str | None) -> list[Parent]:
    """What the result depends on: the representation, and the images where they have to be encoded."""
    parents = [artifact.as_parent_of(out, artifact.path.name)]
    if artifact.kind != "embeddings":
        parents.append(images_parent(images_of(artifact, images), out))
    return parents
