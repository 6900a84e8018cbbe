"""Training on images with labels: builds the objects of a config and runs the loop."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import MANIFEST, Artifact, Parent, Request, open_artifact
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.images.dataset_parts import describe_parts, parts_of_classes, propose_parts
from mlcd.models.servable import Servable
from mlcd.pipelines.encoded import check_outside, images_parent
from mlcd.progress import Stages
from mlcd.training.checkpoint.checkpoint_store import CheckpointStore
from mlcd.training.config import ARITHMETIC, RunConfig
from mlcd.training.data.class_examples import write_examples
from mlcd.training.data.dataset import Dataset, Part
from mlcd.training.data.device_copies import DeviceCopies
from mlcd.training.data.maps import open_shared_dataset
from mlcd.training.flops import step_flops
from mlcd.training.head.classifier_contents import ClassifierContents
from mlcd.training.head.partial_fc import HeadConfig, PartialFC, check_first_centers
from mlcd.training.head.row_adamw import center_optimizer
from mlcd.training.head.state import TrainState
from mlcd.training.optim.average import WeightAverage
from mlcd.training.optim.groups import adamw_settings, parameter_groups, scalar_groups
from mlcd.training.parallel.backbone import Backbone
from mlcd.training.processes import Processes, open_processes
from mlcd.training.run.any_run import choose_algorithms, open_draft, open_tower_start, train_to_end
from mlcd.training.run.changed_settings import check_same_settings
from mlcd.training.run.classification import (
    Classification,
    Evaluate,
    OpenEvaluation,
    open_no_evaluation,
)
from mlcd.training.run.run_files import log_paths, summarize_outcome, write_config
from mlcd.training.start import Start, find_matching_centers
from mlcd.training.tower import freeze, initial_model
from mlcd.world import World

_log = logging.getLogger(__name__)


def run_training(
    config: RunConfig,
    reporter: Stages,
    *,
    cores: int | None = None,
    open_evaluation: OpenEvaluation = open_no_evaluation,
) -> Artifact:
    """Trains or resumes training, and publishes the run at `config.out`.

    Under torchrun every process calls it. Calling it again with the same config resumes an
    interrupted run from its last checkpoint, on any number of processes. The final weights are the
    same as without the interruption (on the CPU, with the same numbers of threads and processes).
    Raises ReportedElsewhere if another process reports the error.
    """
    with open_processes(config.device, config.num_threads, cores) as processes:
        processes.meet("the start")
        return _run(config, reporter, processes, open_evaluation)


def _run(
    config: RunConfig, reporter: Stages, processes: Processes, open_evaluation: OpenEvaluation
) -> Artifact:
    choose_algorithms(config, processes.device)
    out = Path(config.out)
    dataset = open_shared_dataset(config, processes)
    with processes.failing_together():
        checked = check_run(config, dataset, open_evaluation)
    if checked.published is not None:
        return checked.published
    if processes.world.rank == 0:
        for part in dataset.parts:
            _warn_of_parts(part)
    request = checked.request
    with open_draft(out, request, processes) as draft:
        with processes.failing_together():
            model = initial_model(config.model, config.seed, checked.start)
            state = initial_state(config, dataset.num_centers, processes, model, checked.centers)
            store = _open_store(draft.path, config, dataset, processes, request.parents)
        work = Classification(state, dataset, config, processes, checked.evaluation)
        flops = step_flops(config, dataset.num_centers)
        train_to_end(work, config, draft.path, store, processes, reporter, flops=flops)
        fingerprint = state.servable().float().fingerprint()
        processes.meet("the end")
        if processes.world.rank == 0:
            # config.yaml contains paths, which are not part of the result, so it counts as a log.
            summary = {
                "samples": len(dataset),
                "unlabeled": dataset.num_unlabeled,
                "classes": dataset.num_centers,
                "image_classes": dataset.parts[0].entries.num_classes(),
                **summarize_outcome(draft.path, state),
            }
            draft.publish(fingerprint=fingerprint, summary=summary, logs=log_paths(draft.path))
    processes.meet("the end")
    return open_artifact(out, "run", verify_files=False)


@dataclass(frozen=True)
class CheckedRun:
    """The parts of a run, opened and checked to fit together.

    evaluation: evaluates the model while training; None without evaluation. start, centers: initial
    weights and centers; None for random ones. published: the run, if it is already finished.
    """

    request: Request
    evaluation: Evaluate | None
    start: Start | None
    centers: Centers | None
    published: Artifact | None


def check_run(config: RunConfig, dataset: Dataset, open_evaluation: OpenEvaluation) -> CheckedRun:
    """Checks all that does not depend on the machine, and writes nothing.

    Raises ConfigInvalid, InvalidInput or Conflict.
    """
    out = Path(config.out)
    for part in dataset.parts:
        check_outside(part.source.location, out)
    evaluation = open_evaluation(config, [part.listing_digest for part in dataset.parts])
    start = open_tower_start(config)
    centers = _initial_centers(config, dataset, start)
    if centers is not None:
        num_classes, dimension = dataset.num_centers, config.model.output_dim
        check_first_centers(centers.vectors.shape, num_classes, dimension)
    check_labels(config, dataset.label_tables, dataset.num_centers)
    request = Request("run", config.identity(), tuple(_list_parents(config, out, dataset, start)))
    _check_earlier_run(out, request)
    return CheckedRun(request, evaluation, start, centers, find_published(out, request))


def _warn_of_parts(part: Part) -> None:
    """Warns if the image folders are parts (train, test) of a data set: the run trains on all."""
    class_names = {name for name in part.entries.class_names() if name is not None}
    if parts := parts_of_classes(class_names):
        location = part.source.location
        _log.warning(
            "%s, and the run trains on all of them: to keep one for testing, train only on another,"
            " such as %s/%s; in `mlcd evaluate` %s",
            describe_parts(location, parts),
            location.rstrip("/"),
            min(parts, key=lambda folder: parts[folder] != "train"),
            propose_parts(location, parts),
        )


def _check_earlier_run(out: Path, request: Request) -> None:
    """Raises Conflict if `out` has a run, finished or not, of another version or other settings.

    A run of another version would resume with other crops and negatives.
    """
    finished = (
        open_artifact(out, verify_files=False).request().identity()
        if (out / MANIFEST).is_file()
        else None
    )
    for identity in (finished, Draft(out, request).read_request()):
        if (
            identity
            and identity["kind"] == "run"
            and identity["config"].get("arithmetic") != ARITHMETIC
        ):
            raise Conflict(
                f"{out} was started by another version of mlcd, which crops images and draws "
                "negatives differently",
                remedy="finish it with that version, remove it, or give another output directory",
            )
    check_same_settings(out, request)


def _initial_centers(config: RunConfig, dataset: Dataset, start: Start | None) -> Centers | None:
    """Returns the centers that the head starts from; None for random centers.

    Raises ConfigInvalid for model.head=kept if the start's centers are of other classes.
    """
    if config.data.centers is not None:
        return Centers.open(fetch_copy(config.data.centers))
    if start is None or config.model.head == "new":
        return None
    centers_path = find_matching_centers(start, dataset.classes)
    if centers_path is None and config.model.head == "kept":
        raise ConfigInvalid(
            f"{config.model.start} was not trained on the classes of "
            f"{dataset.label_tables[0].artifact.path}",
            remedy="set model.head=new, or label with the centers that it was trained on",
        )
    return None if centers_path is None else Centers.open(centers_path)


def initial_state(
    config: RunConfig,
    num_classes: int,
    processes: Processes,
    model: Servable | None = None,
    centers: Centers | None = None,
) -> TrainState:
    """Builds the state at step 0.

    model: initial tower; None for random weights, which are drawn on the CPU, so that they do not
    depend on the device. Raises ConfigInvalid if `centers` do not match the number of classes or
    the embedding's dimension, or for TF32 without a CUDA GPU.
    """
    if config.compute.head_products == "tf32" and processes.device.type != "cuda":
        raise ConfigInvalid(
            "compute.head_products=tf32 requires a CUDA GPU", remedy="set it to fp32 or bf16"
        )
    model = (model or initial_model(config.model, config.seed)).to(processes.device)
    freeze(model.trunk, config.model)
    compute = config.compute
    backbone = Backbone(
        model,
        processes.world,
        precision=compute.precision,
        sharded=compute.backbone == "fsdp",
        gathered=compute.gathered,
        recompute=compute.recompute,
        compiled=compute.compile,
    )
    head = _initial_head(config, num_classes, processes.world, centers).to(processes.device)
    if config.compute.precision == "fp64":
        head.double()
    groups = parameter_groups(model.trunk, config.optim) + scalar_groups(head.scalars, config.optim)
    optimizer = torch.optim.AdamW(groups, **adamw_settings(config.optim))
    decay = config.optim.ema
    return TrainState(
        backbone,
        head,
        optimizer,
        center_optimizer(head, config.optim),
        average=None if decay is None else WeightAverage.of(model.trunk, decay),
        copies=DeviceCopies(processes.device),
    )


def _initial_head(
    config: RunConfig, num_classes: int, world: World, centers: Centers | None
) -> PartialFC:
    settings = HeadConfig.of(config.loss, num_classes, config.seed, config.compute.head_products)
    head = PartialFC(num_classes, config.model.output_dim, settings, world=world)
    if centers is None:
        head.initialize(config.seed)
    else:
        head.initialize_from(centers.vectors)
    return head


def check_labels(config: RunConfig, tables: Sequence[LabelTable], num_classes: int) -> None:
    """Raises ConfigInvalid if there are too few labels, or too few centers, for the loss."""
    num_labels, setting = (
        config.loss.num_stored,
        "drawn_from" if config.loss.drawn_from else "labels_per_image",
    )
    for table in tables:
        stored = int(table.artifact.config["top"])
        if num_labels > stored:
            raise ConfigInvalid(
                f"loss.{setting} must be at most the {stored} labels per image in "
                f"{table.artifact.path}, got {num_labels}",
                remedy=f"label with --top {num_labels}, or set loss.{setting}={stored}",
            )
    if num_labels >= num_classes:
        raise ConfigInvalid(
            f"{num_labels} labels per image leave no negative among {num_classes} centers",
            remedy=f"lower loss.{setting} or cluster into more centers",
        )


def _list_parents(
    config: RunConfig, out: Path, dataset: Dataset, start: Start | None
) -> Iterator[Parent]:
    """Yields the parents. The first data set of a mixture has the roles of a single data set."""
    for index, (part, table, mixed) in enumerate(
        zip(dataset.parts, dataset.label_tables, config.data.sources, strict=True)
    ):
        suffix = f"-{index}" if index else ""
        if mixed.selection is not None:
            selection = open_artifact(Path(mixed.selection), "selection", verify_files=False)
            yield selection.as_parent_of(out, f"selection{suffix}")
        yield table.artifact.as_parent_of(out, f"labels{suffix}")
        yield replace(images_parent(part.source, out, part.listing_digest), role=f"images{suffix}")
    if config.data.centers is not None:
        yield open_artifact(
            fetch_copy(config.data.centers), "centers", verify_files=False
        ).as_parent_of(out, "centers")
    if start is not None:
        yield start.parent


def _open_store(
    run: Path,
    config: RunConfig,
    dataset: Dataset,
    processes: Processes,
    parents: tuple[Parent, ...],
) -> CheckpointStore:
    if processes.world.rank == 0:
        write_config(config, run)
        write_examples(dataset, run)
    sizes = np.zeros(dataset.num_centers, dtype=np.int64)
    for part in dataset.parts:
        sizes += _count_first_labels(part.labels, dataset.num_centers)
    return CheckpointStore(
        run,
        config.checkpoint,
        processes,
        parents=parents,
        contents=ClassifierContents(run, dataset.names, sizes, dataset.classes),
    )


def _count_first_labels(labels: NDArray[np.int32], num_centers: int) -> NDArray[np.int64]:
    first_labels = labels[:, 0]
    return np.bincount(first_labels[first_labels >= 0], minlength=num_centers).astype(np.int64)
