"""Fine-tunes a whole tower with the trainer, and evaluates it on a split.

All results are artifacts in the output directory, so the same command resumes an interrupted run:
features and linear-probe of the original tower, labels of the training images, run, fine-tune.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import Artifact, Request, open_artifact
from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import InvalidInput
from mlcd.images.entries import Entry
from mlcd.images.quiet import silence_decoders
from mlcd.images.sources import open_source
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.models.runs import find_checkpoint
from mlcd.pipelines.embed import embed
from mlcd.pipelines.encoded import images_parent
from mlcd.pipelines.label_classes import label_by
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter
from mlcd.training.config import RunConfig, load_config
from mlcd.training.evaluation.measured import measure_answers
from mlcd.training.evaluation.report import ProbeProtocol, Subject, evaluate_all
from mlcd.training.evaluation.representations import locate, open_representation
from mlcd.training.evaluation.scores import Metric, answers
from mlcd.training.evaluation.seen import check_seen, find_seen
from mlcd.training.evaluation.splits import (
    LabeledRows,
    ListedKeys,
    SplitFile,
    check_probe_split,
    split_digest,
)
from mlcd.training.evaluation.stored_results import Record, StoredOutcome, find_or_create
from mlcd.training.run.run_training import run_training
from mlcd.types import SampleKey

RECIPE: Final = "finetune"


@dataclass(frozen=True)
class FineTuning:
    """A data set to fine-tune on.

    split: the parts by keys. hold_out: share to test on if neither folders nor `split` set it.
    overrides: of the recipe. may_be_seen: count test images that the tower has seen, instead of
    raising. may_be_unmatched: count keys of the split that match no image, instead of raising.
    """

    images: str
    split: SplitFile | None
    hold_out: float | None
    metric: Metric
    overrides: tuple[str, ...]
    may_be_seen: bool
    may_be_unmatched: bool = False


def fine_tune(
    spec: str,
    request: FineTuning,
    out: Path,
    *,
    options: EncoderOptions,
    announce: Callable[[str], None],
    reporter: Reporter,
) -> list[Record]:
    """Returns the records of a model's linear probe and of its fine-tuned tower.

    Both are trained and tested on the same images. Raises InvalidInput for a split of several
    folds, and for test images that the tower has seen.
    """
    if request.split is not None and len(request.split.folds) > 1:
        raise InvalidInput(
            f"fine-tuning requires a split with one fold, got {len(request.split.folds)}",
            remedy="give one of the folds as train",
        )
    features = out / "features"
    silence_decoders()
    with closing(open_encoder(resolve_model(spec, announce), options)) as encoder:
        embed(open_source(request.images), encoder, features, reporter)
    probe = ProbeProtocol("embedding", request.metric, request.hold_out)
    subject = Subject(
        split=request.split,
        may_be_seen=request.may_be_seen,
        may_be_unmatched=request.may_be_unmatched,
    )
    records = evaluate_all([features], probe, subject, out=out / "linear-probe", reporter=reporter)
    samples = open_representation(locate(features)).samples
    if request.split is not None:
        (samples,) = request.split.parts(samples, may_be_unmatched=request.may_be_unmatched)
    run = _train_known(spec, request, samples, out, reporter)
    return [*records, _classify_tested(run, request, samples, out)]


def _hold_out(request: FineTuning) -> float:
    return HELD_OUT_FRACTION if request.hold_out is None else request.hold_out


def _train_known(
    spec: str, request: FineTuning, samples: LabeledRows, out: Path, reporter: Reporter
) -> Artifact:
    """Trains on the images that are not in the test part, and returns the last checkpoint."""
    split = samples.split(_hold_out(request))
    check_probe_split(samples.class_names, split)
    names = sorted(set(samples.class_names))
    class_ids = {name: index for index, name in enumerate(names)}
    class_of: dict[SampleKey, int] = {
        samples.keys[row]: class_ids[samples.class_names[row]]
        for row in np.flatnonzero(split.known).tolist()
    }

    def label_of(entry: Entry) -> list[tuple[int, float]]:
        return [(class_of[entry.key], 1.0)] if entry.key in class_of else []

    facts = {"of": "classes", "split": _digest(samples, split.test)}
    source = open_source(request.images)
    label_by(source, label_of, names, out / "labels", top=1, facts=facts, reporter=reporter)
    run = run_training(_config(spec, request, out), reporter)
    return open_artifact(find_checkpoint(run.path), "checkpoint")


def _config(spec: str, request: FineTuning, out: Path) -> RunConfig:
    paths = (
        f"model.start={spec}",
        f"data.images={request.images}",
        f"data.labels={out / 'labels'}",
        "data.hold_out=0",
        f"out={out / 'run'}",
    )
    return load_config(RECIPE, [*request.overrides, *paths])


def _classify_tested(
    checkpoint: Artifact, request: FineTuning, samples: LabeledRows, out: Path
) -> Record:
    """Classifies the test images by the nearest trained class center."""
    split = samples.split(_hold_out(request))
    rows = np.flatnonzero(split.test).tolist()
    keys = [samples.keys[row] for row in rows]
    class_names = [samples.class_names[row] for row in rows]
    digest = _digest(samples, split.test)
    settings = {
        "kind": "fine-tune",
        "recipe": RECIPE,
        "overrides": list(request.overrides),
        "features": "embedding",
        "metric": request.metric,
        "steps": checkpoint.config["step"],
        "train": f"{int(split.known.sum())} of {Path(request.images).name}",
        "test": f"{len(rows)} of {Path(request.images).name}",
        "images": len(samples.keys),
        "classes": len(set(samples.class_names)),
        "split": digest,
    }

    def create_record() -> tuple[Record, StoredOutcome]:
        tested = open_representation(
            checkpoint, images=request.images, listed=ListedKeys(keys, "the split")
        ).samples
        sha256 = tested.sha256
        assert sha256 is not None
        overlap = check_seen(
            find_seen(checkpoint).among(sha256),
            keys,
            checkpoint.path,
            may_be_seen=request.may_be_seen,
        )
        centers = Centers.open(checkpoint.path / "centers")
        scores = centers.align(tested.rows).astype(np.float64) @ centers.vectors.T
        name = f"fine_tune_{request.metric.replace('-', '_')}"
        measured = measure_answers(name, answers(scores, samples.classes[rows]), request.metric)
        record = {
            "representation": checkpoint.path.name,
            "digest": checkpoint.digest,
            "metrics": measured.metrics,
            "intervals": {key: list(ends) for key, ends in measured.intervals.items()},
            "seen": overlap.facts(),
            "protocol": settings,
        }
        assert measured.right is not None
        return record, StoredOutcome(keys, class_names, measured.right, {})

    def describe(path: Path) -> Request:
        parents = (
            checkpoint.as_parent_of(path, "checkpoint"),
            images_parent(open_source(request.images), path),
        )
        config: dict[str, Any] = {**settings, **({"seen": True} if request.may_be_seen else {})}
        return Request("evaluation", config, parents)

    return find_or_create(out / "fine-tune", describe, create_record)


def _digest(samples: LabeledRows, test: NDArray[np.bool_]) -> str:
    return split_digest(samples.keys, samples.class_names, test)
