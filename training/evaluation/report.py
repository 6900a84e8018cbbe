"""Evaluate several representations under one protocol, and keep the result as an artifact."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from mlcd.artifact import Artifact, Parent, Request
from mlcd.draft import Draft, find_published
from mlcd.errors import ConfigInvalid
from mlcd.keys import held_out
from mlcd.pipelines.embed import images_parent
from mlcd.progress import Reporter
from mlcd.world import World
from training.evaluation.encoding import Features
from training.evaluation.knn import clusters, knn
from training.evaluation.linear_probe import linear_probe
from training.evaluation.representations import LabeledRows, distinct_names, images_of, locate, open_representation
from training.evaluation.scores import Metric
from training.evaluation.splits import split_digest

RESULTS = "results.json"


@dataclass(frozen=True)
class KnnProtocol:
    features: Features
    metric: Metric
    hold_out: float
    neighbors: int
    kind: ClassVar[str] = "knn"

    def measure(self, samples: LabeledRows, world: World, device: torch.device) -> Iterator[tuple[str, float]]:
        del device  # neighbors are found on the CPU, exactly
        yield from knn(samples, neighbors=self.neighbors, hold_out=self.hold_out, metric=self.metric, world=world)


@dataclass(frozen=True)
class ProbeProtocol:
    features: Features
    metric: Metric
    hold_out: float
    kind: ClassVar[str] = "linear-probe"

    def measure(self, samples: LabeledRows, world: World, device: torch.device) -> Iterator[tuple[str, float]]:
        yield from linear_probe(samples, hold_out=self.hold_out, metric=self.metric, world=world, device=device)


@dataclass(frozen=True)
class ClustersProtocol:
    features: Features
    seed: int
    hold_out: ClassVar[float] = 0.0
    kind: ClassVar[str] = "clusters"

    def measure(self, samples: LabeledRows, world: World, device: torch.device) -> Iterator[tuple[str, float]]:
        del world, device  # every process clusters all rows, and finds the same
        yield from clusters(samples, seed=self.seed)


Protocol: TypeAlias = KnnProtocol | ProbeProtocol | ClustersProtocol


def evaluate_all(
    paths: Sequence[Path],
    protocol: Protocol,
    *,
    images: str | None,
    out: Path | None,
    reporter: Reporter,
    world: World | None = None,
    device: torch.device | None = None,
) -> list[dict[str, Any]]:
    """One record per path, in their order: representation, its digest, metrics, and the protocol that gave them.

    Called by every process of a world; the first one writes `out`.
    """
    world, device = world or World(), device or torch.device("cpu")
    artifacts = [locate(path) for path in paths]
    named = list(zip(artifacts, distinct_names([artifact.path for artifact in artifacts]), strict=True))
    if images is not None and all(artifact.kind == "embeddings" for artifact in artifacts):
        raise ConfigInvalid("--images has no effect on embeddings", remedy="give a checkpoint or a run")
    settings = {"kind": protocol.kind, **asdict(protocol)}
    request = None
    if out is not None:
        parents = tuple(parent for artifact in artifacts for parent in _parents(artifact, out, images))
        request = Request("evaluation", settings, parents)
        if (done := find_published(out, request)) is not None:
            by_digest = {stored["digest"]: stored for stored in json.loads(done.file(RESULTS).read_text())}
            return [by_digest[artifact.digest] | {"representation": name} for artifact, name in named]
    with reporter.stage("evaluate", None) as meter:

        def record(artifact: Artifact, name: str) -> dict[str, Any]:
            measured = _evaluate(artifact, protocol, settings, images, world, device, lambda: meter.advance(1))
            return {"representation": name, **measured}

        results = [record(artifact, name) for artifact, name in named]
    if out is not None and request is not None and world.rank == 0:
        with Draft(out, request) as draft:
            draft.write_json(RESULTS, results)
            draft.publish()
    return results


def result_line(result: dict[str, Any]) -> str:
    """Name and metrics of one record, for people."""
    return f"{result['representation']}: " + ", ".join(
        f"{name} {value:.4g}" for name, value in result["metrics"].items()
    )


def protocol_line(result: dict[str, Any]) -> str:
    """What the numbers of one record are of, for people."""
    protocol = {**result["protocol"], "split": result["protocol"]["split"][:12]}
    return "protocol: " + ", ".join(f"{name} {value}" for name, value in protocol.items())


def _evaluate(
    artifact: Artifact,
    protocol: Protocol,
    settings: dict[str, Any],
    images: str | None,
    world: World,
    device: torch.device,
    on_image: Callable[[], None],
) -> dict[str, Any]:
    representation = open_representation(
        artifact, images=images, features=protocol.features, world=world, device=device, on_image=on_image
    )
    samples = representation.samples
    test = held_out(samples.splits, protocol.hold_out)
    facts = {"images": len(samples.keys), "classes": len(np.unique(samples.classes))}
    return {
        "digest": representation.digest,
        "metrics": dict(protocol.measure(samples, world, device)),
        "protocol": {**settings, **facts, "split": split_digest(samples.keys, samples.class_names, test)},
    }


def _parents(artifact: Artifact, out: Path, images: str | None) -> list[Parent]:
    """What the result depends on: the representation, and the images where they have to be encoded."""
    parents = [artifact.as_parent_of(out, artifact.path.name)]
    if artifact.kind != "embeddings":
        parents.append(images_parent(images_of(artifact, images), out))
    return parents
