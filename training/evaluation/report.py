"""Evaluates several representations under one protocol, and stores the results as an artifact."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.artifacts.manifest import Artifact, Request
from mlcd.errors import ConfigInvalid
from mlcd.images.sources import open_source
from mlcd.keys import HELD_OUT_FRACTION, mask_held_out
from mlcd.pipelines.encoded import images_parent
from mlcd.progress import Reporter
from mlcd.training.evaluation.knn import clusters, knn_answers
from mlcd.training.evaluation.label_tables import SeveralLabels
from mlcd.training.evaluation.linear_probe import fit_probe
from mlcd.training.evaluation.measured import Measurement, average_folds, measure_answers
from mlcd.training.evaluation.representations import (
    Features,
    Representation,
    distinct_names,
    images_of,
    locate,
    open_representation,
)
from mlcd.training.evaluation.scores import Metric
from mlcd.training.evaluation.seen import SeenAmong, check_seen, find_seen
from mlcd.training.evaluation.splits import (
    LabeledRows,
    ListedKeys,
    Sides,
    SplitFile,
    check_tested_classes,
    split_digest,
)
from mlcd.training.evaluation.stored_results import (
    Record,
    StoredOutcome,
    find_results,
    write_results,
)
from mlcd.training.evaluation.voc_probe import voc_probe
from mlcd.world import World

_DIGEST: Final = re.compile("[0-9a-f]{64}")
_SHOWN: Final = 12  # characters of a digest that are printed


@dataclass(frozen=True)
class KnnProtocol:
    """The settings of the k-NN evaluation.

    hold_out: share of each class to test on; None uses 20 %, or the split that the images have.
    """

    features: Features
    metric: Metric
    hold_out: float | None
    neighbors: int
    kind: ClassVar[str] = "knn"

    def measure(self, samples: LabeledRows, world: World, device: torch.device) -> Measurement:
        # Neighbors are searched exactly, on the CPU.
        del device
        share = _hold_out_share(self.hold_out)
        outcome = knn_answers(samples, neighbors=self.neighbors, hold_out=share, world=world)
        return measure_answers(f"knn_{self.metric.replace('-', '_')}", outcome, self.metric)


@dataclass(frozen=True)
class ProbeProtocol:
    """The settings of the linear probe; for hold_out see KnnProtocol."""

    features: Features
    metric: Metric
    hold_out: float | None
    kind: ClassVar[str] = "linear-probe"

    def measure(self, samples: LabeledRows, world: World, device: torch.device) -> Measurement:
        share = _hold_out_share(self.hold_out)
        outcome = fit_probe(samples, hold_out=share, metric=self.metric, world=world, device=device)
        name = f"linear_probe_{self.metric.replace('-', '_')}"
        return measure_answers(name, outcome.answers, self.metric, dict(outcome.facts(self.metric)))


@dataclass(frozen=True)
class LabelsProtocol:
    """The settings of the linear probe with several labels per image; see also KnnProtocol."""

    features: Features
    labels: SeveralLabels
    hold_out: float | None
    kind: ClassVar[str] = "linear-probe"

    def measure(self, samples: LabeledRows, world: World, device: torch.device) -> Measurement:
        # Each process fits all labels itself, with the same result.
        del world, device
        share = _hold_out_share(self.hold_out)
        return voc_probe(samples.rows, self.labels.of(samples.keys), samples.split(share))


@dataclass(frozen=True)
class ClustersProtocol:
    features: Features
    seed: int
    hold_out: ClassVar[None] = None
    kind: ClassVar[str] = "clusters"

    def measure(self, samples: LabeledRows, world: World, device: torch.device) -> Measurement:
        # Each process clusters all rows itself, with the same result.
        del world, device
        return Measurement(dict(clusters(samples, seed=self.seed)))


Protocol: TypeAlias = KnnProtocol | ProbeProtocol | LabelsProtocol | ClustersProtocol


@dataclass(frozen=True)
class Subject:
    """The images and the split of one evaluation.

    images: location of the images to encode; None uses a run's training images. sides: the known
    and the tested side; None holds out a share of each class, or uses the split of the images'
    folders. may_be_seen: count test images that a run has seen, instead of raising. split: the
    parts by keys; excludes sides. may_be_unmatched: count keys of a split, lists or labels that
    match no image, instead of raising.
    """

    images: str | None = None
    sides: Sides | None = None
    may_be_seen: bool = False
    split: SplitFile | None = None
    may_be_unmatched: bool = False


def evaluate_all(
    paths: Sequence[Path],
    protocol: Protocol,
    subject: Subject,
    *,
    out: Path | None,
    reporter: Reporter,
    world: World | None = None,
    device: torch.device | None = None,
) -> list[dict[str, Any]]:
    """Returns one record per path, in order: representation, digest, metrics and protocol.

    Every process calls it; process 0 writes `out`. Raises InvalidInput if a run has seen images
    that it is tested on.
    """
    world, device = world or World(), device or torch.device("cpu")
    artifacts = [locate(path) for path in paths]
    _check_subject(artifacts, protocol, subject)
    named_artifacts = list(
        zip(artifacts, distinct_names([artifact.path for artifact in artifacts]), strict=True)
    )
    settings = _settings(protocol, subject)
    request = None
    if out is not None:
        request = _request(artifacts, settings, subject, out)
        if (stored_records := find_results(out, request)) is not None:
            by_digest = {stored["digest"]: stored for stored in stored_records}
            return [
                by_digest[artifact.digest] | {"representation": name}
                for artifact, name in named_artifacts
            ]
    with reporter.stage("evaluate", None) as meter:

        def evaluate_one(artifact: Artifact, name: str) -> tuple[Record, StoredOutcome | None]:
            record, outcome = _evaluate(
                artifact, protocol, settings, subject, world, device, lambda: meter.advance(1)
            )
            return {"representation": name, **record}, outcome

        results = [evaluate_one(artifact, name) for artifact, name in named_artifacts]
    records = [record for record, _ in results]
    if out is not None and request is not None and world.rank == 0:
        write_results(out, request, records, [outcome for _, outcome in results])
    return records


def result_line(result: dict[str, Any]) -> str:
    """Returns a record's name, metrics and number of seen test images as text."""
    intervals = result.get("intervals", {})
    metrics = ", ".join(
        f"{name} {value:.4g}{_format_interval(intervals.get(name))}"
        for name, value in result["metrics"].items()
    )
    return f"{result['representation']}: {metrics}{_describe_seen(result.get('seen'))}"


def _format_interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.4g}, {interval[1]:.4g}]"


def _describe_seen(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return ""
    text = f", seen {facts['images']}"
    if facts["images"]:
        text += f" ({facts['trained_on']} trained on, {facts['clustered']} clustered)"
    return text + "".join(f"; unknown: {reason}" for reason in facts["unknown"])


def protocol_line(result: dict[str, Any]) -> str:
    """Returns the protocol of one record as text."""
    shortened = {
        name: value[:_SHOWN]
        for name, value in result["protocol"].items()
        if isinstance(value, str) and _DIGEST.fullmatch(value)
    }
    protocol = {**result["protocol"], **shortened}
    return "protocol: " + ", ".join(f"{name} {value}" for name, value in protocol.items())


def _hold_out_share(hold_out: float | None) -> float:
    return HELD_OUT_FRACTION if hold_out is None else hold_out


def _check_subject(artifacts: Sequence[Artifact], protocol: Protocol, subject: Subject) -> None:
    sides, embeddings = subject.sides, [artifact.kind == "embeddings" for artifact in artifacts]
    if isinstance(protocol, LabelsProtocol) and sides is not None:
        raise ConfigInvalid(
            "--labels requires a single set of images, got --train and --test",
            remedy="give --split instead of --train and --test",
        )
    if subject.split is not None and (sides is not None or protocol.hold_out is not None):
        raise ConfigInvalid(
            "--split already sets what is held out",
            remedy="leave out --hold-out, --train and --test",
        )
    if subject.images is not None and all(embeddings):
        raise ConfigInvalid(
            "--images requires a checkpoint or a run, got embeddings",
            remedy="give a checkpoint or a run",
        )
    if sides is None:
        return
    if protocol.hold_out is not None:
        raise ConfigInvalid(
            "--train and --test already set what is held out", remedy="leave out --hold-out"
        )
    if sides.kind != "keys" and subject.images is not None:
        raise ConfigInvalid(
            "--train and --test already set the images", remedy="leave out --images"
        )
    if sides.kind == "images" and any(embeddings):
        raise ConfigInvalid(
            "embeddings already determine their images, got images in --train and --test",
            remedy="give --train and --test two embeddings artifacts, or two lists of keys",
        )


def _settings(protocol: Protocol, subject: Subject) -> dict[str, Any]:
    """Returns the settings that decide the metrics, for the stored protocol."""
    settings = {"kind": protocol.kind, **_fields(protocol)}
    if "hold_out" in settings:
        settings["hold_out"] = _hold_out_share(protocol.hold_out)
    if subject.split is not None:
        settings.pop("hold_out", None)
        settings |= {"split_file": subject.split.sha256, "folds": len(subject.split.folds)}
    if subject.sides is not None:
        settings.pop("hold_out", None)
        settings |= subject.sides.digests()
    return settings


def _fields(protocol: Protocol) -> dict[str, Any]:
    if not isinstance(protocol, LabelsProtocol):
        return asdict(protocol)
    return {
        "features": protocol.features,
        "metric": "map-11",
        "hold_out": protocol.hold_out,
        "labels_sha256": protocol.labels.sha256,
    }


def _request(
    artifacts: Sequence[Artifact], settings: dict[str, Any], subject: Subject, out: Path
) -> Request:
    """Builds the request, with the representations and any images to encode as parents."""
    sides, parents = (
        subject.sides,
        [artifact.as_parent_of(out, artifact.path.name) for artifact in artifacts],
    )
    if sides is not None and sides.kind == "images":
        locations = {"train": sides.train, "test": sides.test}
        parents += [
            replace(images_parent(open_source(location), out), role=role)
            for role, location in locations.items()
        ]
    elif sides is not None and sides.kind == "embeddings":
        parents.append(locate(Path(sides.train)).as_parent_of(out, "train"))
    else:
        encoded = [artifact for artifact in artifacts if artifact.kind != "embeddings"]
        parents += [images_parent(images_of(artifact, subject.images), out) for artifact in encoded]
    allowed = {"seen": subject.may_be_seen, "unmatched": subject.may_be_unmatched}
    config = settings | {name: True for name, is_allowed in allowed.items() if is_allowed}
    return Request("evaluation", config, tuple(parents))


def _evaluate(
    artifact: Artifact,
    protocol: Protocol,
    settings: dict[str, Any],
    subject: Subject,
    world: World,
    device: torch.device,
    on_image: Callable[[], None],
) -> tuple[Record, StoredOutcome | None]:
    representation = open_representation(
        artifact,
        images=subject.images,
        sides=subject.sides,
        features=protocol.features,
        world=world,
        device=device,
        on_image=on_image,
        listed=_list_keys(protocol, subject),
        may_be_unmatched=subject.may_be_unmatched,
    )
    parts = _parts(representation, protocol, subject)
    # All folds have the same test samples.
    samples = parts[0]
    tested = _mask_tested(samples, protocol)
    seen = _count_seen(artifact, samples, tested)
    if protocol.kind != "clusters" or samples.own_split is not None:
        _check_seen(artifact, samples, tested, seen, subject)
    measured = average_folds([protocol.measure(part, world, device) for part in parts])
    record = {
        "digest": representation.digest,
        "metrics": measured.metrics,
        **({"intervals": measured.intervals} if measured.intervals else {}),
        **({} if seen is None else {"seen": seen.facts()}),
        "protocol": _protocol(replace(representation, samples=samples), protocol, settings, tested),
    }
    if measured.right is None:
        return record, None
    rows = np.flatnonzero(tested).tolist()
    keys, names = ([column[row] for row in rows] for column in (samples.keys, samples.class_names))
    return record, StoredOutcome(keys, names, measured.right, {})


def _list_keys(protocol: Protocol, subject: Subject) -> ListedKeys | None:
    if not isinstance(protocol, LabelsProtocol):
        return None
    return ListedKeys(protocol.labels.keys, "the table of labels", subject.may_be_unmatched)


def _parts(
    representation: Representation, protocol: Protocol, subject: Subject
) -> list[LabeledRows]:
    """Returns the samples with their split, for each fold."""
    samples = representation.samples
    if subject.split is not None:
        return list(subject.split.parts(samples, may_be_unmatched=subject.may_be_unmatched))
    if samples.own_split is not None:
        if protocol.hold_out is not None:
            raise ConfigInvalid(
                f"the folders of {representation.test} already are a split",
                remedy="leave out --hold-out, or give the images of one side with --images",
            )
        check_tested_classes(samples.class_names, samples.own_split)
    return [samples]


def _mask_tested(samples: LabeledRows, protocol: Protocol) -> NDArray[np.bool_]:
    """Returns a mask of the tested samples: all samples if none is held out."""
    if samples.own_split is not None:
        return samples.own_split.test
    test = mask_held_out(
        samples.splits, 0.0 if protocol.kind == "clusters" else _hold_out_share(protocol.hold_out)
    )
    return test if test.any() else np.ones_like(test)


def _protocol(
    representation: Representation,
    protocol: Protocol,
    settings: dict[str, Any],
    tested: NDArray[np.bool_],
) -> dict[str, Any]:
    samples = representation.samples
    num_tested, num_known = int(tested.sum()), int((~tested).sum())
    if num_known:
        train = f"{num_known} of {representation.train}"
    else:
        train = "the same" if protocol.kind == "clusters" else "all others"
    classes = (
        protocol.labels.names
        if isinstance(protocol, LabelsProtocol)
        else sorted(set(samples.class_names))
    )
    facts = {
        "images": len(samples.keys),
        "classes": len(classes),
        "train": train,
        "test": f"{num_tested} of {representation.test}",
    }
    applied = {
        name: value
        for name, value in settings.items()
        if samples.own_split is None or name != "hold_out"
    }
    is_test = tested if num_known else np.zeros_like(tested)
    return {**applied, **facts, "split": split_digest(samples.keys, samples.class_names, is_test)}


def _count_seen(
    artifact: Artifact, samples: LabeledRows, tested: NDArray[np.bool_]
) -> SeenAmong | None:
    """Returns which tested images a run has seen; None for embeddings, whose run is unknown."""
    if artifact.kind == "embeddings" or samples.sha256 is None:
        return None
    return find_seen(artifact).among(samples.sha256[tested])


def _check_seen(
    artifact: Artifact,
    samples: LabeledRows,
    tested: NDArray[np.bool_],
    seen: SeenAmong | None,
    subject: Subject,
) -> None:
    if seen is not None:
        keys = [samples.keys[row] for row in np.flatnonzero(tested).tolist()]
        check_seen(seen, keys, artifact.path, may_be_seen=subject.may_be_seen)
