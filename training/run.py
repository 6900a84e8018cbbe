"""Composition root of training: config to objects to loop."""

import json
from pathlib import Path

import numpy as np
import torch
import yaml

from mlcd.artifact import Artifact, Draft, Request, find_published
from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.images.sources import Source, open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.labels.table import LabelTable
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT
from mlcd.pipelines.embed import images_parent
from mlcd.progress import Reporter
from training.checkpoint.store import CheckpointStore
from training.config import RunConfig, validate_config
from training.data.samples import Samples, load_samples
from training.loop import train
from training.optim.groups import center_optimizer, parameter_groups
from training.parallel.partial_fc import PartialFC
from training.state import TrainState
from training.telemetry.metrics import NAME as METRICS
from training.telemetry.metrics import MetricsLog

CONFIG = "config.yaml"


def run_training(config: RunConfig, reporter: Reporter) -> Artifact:
    """Train, or go on training, and publish the run at `config.out`.

    A run that was interrupted goes on from its last checkpoint when the same config is run again, and ends
    with the same weights as if it had not been interrupted (CPU, same number of threads).
    """
    out = Path(config.out)
    table = LabelTable.open(Path(config.data.labels))
    source = open_source(config.data.images)
    request = _request(config, out, table, source)
    if (done := find_published(out, request)) is not None:
        return done
    device = _prepare_torch(config)
    with Draft(out, request) as draft:
        (draft.path / CONFIG).write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        with reporter.stage("load", len(source.entries)) as meter:
            samples = load_samples(
                source,
                table,
                image_size=config.model.image_size,
                labels_per_image=1 if config.loss.kind == "cd" else config.loss.labels_per_image,
                hold_out=config.data.hold_out,
                memory_gib=config.data.memory_gib,
                on_sample=lambda: meter.advance(1),
            )
        store = _store(draft.path, config, table, samples)
        state = _initial_state(config, table.num_centers, device)
        if (step := store.latest()) is None:
            store.save(state, request.parents)
        else:
            store.load(state, step)
        log = MetricsLog(draft.path, state.step)
        with reporter.stage("train", config.schedule.steps, done=state.step) as meter:
            train(state, samples, config, store=store, parents=request.parents, log=log, meter=meter)
        summary = {
            "samples": len(samples),
            "unlabeled": samples.num_unlabeled,
            "rejected": samples.num_rejected,
            "classes": table.num_centers,
            "final": json.loads((draft.path / METRICS).read_text().splitlines()[-1]),
        }
        # config.yaml names places, which are no part of what was made; so it is kept like a log.
        return draft.publish(fingerprint=state.model.fingerprint(), summary=summary, logs=(METRICS, CONFIG))


def read_run_config(run: Path) -> RunConfig:
    """The config of a run, finished or interrupted (`RUN` names either)."""
    for directory in (run, run.with_name(run.name + ".partial")):
        if (directory / CONFIG).is_file():
            return validate_config(yaml.safe_load((directory / CONFIG).read_text()))
    raise ConfigInvalid(f"{run} is not a run", remedy="give the directory that `mlcd train … out=RUN` was given")


def _request(config: RunConfig, out: Path, table: LabelTable, source: Source) -> Request:
    if not source.entries:
        raise InvalidInput(f"there are no images in {config.data.images}")
    wanted = 1 if config.loss.kind == "cd" else config.loss.labels_per_image
    stored = int(table.artifact.config["top"])
    if wanted > stored:
        raise ConfigInvalid(
            f"loss.labels_per_image={wanted}, but {table.artifact.path} holds {stored} labels per image",
            remedy=f"label with --top {wanted}, or set loss.labels_per_image={stored}",
        )
    if wanted >= table.num_centers:
        raise ConfigInvalid(
            f"{wanted} labels per image leave no negative among {table.num_centers} centers",
            remedy="lower loss.labels_per_image or cluster into more centers",
        )
    parents = (table.artifact.as_parent_of(out, "labels"), images_parent(source, out))
    return Request("run", config.identity(), parents)


def _prepare_torch(config: RunConfig) -> torch.device:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(config.num_threads or available_cores())
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid("device=cuda, but torch finds no CUDA GPU", remedy="use device=auto")
    use_cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


def _initial_state(config: RunConfig, num_classes: int, device: torch.device) -> TrainState:
    """Weights are drawn on the CPU, so that they do not depend on the device."""
    generator = torch.Generator().manual_seed(config.seed)
    trunk = ViT(config.model.vit())
    trunk.initialize(generator)
    size = config.model.image_size
    model = Servable(trunk, PreprocessSpec(resize_shortest=size, crop=size)).to(device)
    centers = PartialFC(num_classes, config.model.embedding_dim, config.loss.head(num_classes, config.seed))
    centers.initialize(config.seed)
    centers.to(device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model.trunk, config.optim), lr=config.optim.lr, betas=config.optim.betas
    )
    return TrainState(model, centers, optimizer, center_optimizer(centers, config.optim))


def _store(run: Path, config: RunConfig, table: LabelTable, samples: Samples) -> CheckpointStore:
    first_labels = samples.labels[:, 0]
    sizes = np.bincount(first_labels[first_labels >= 0].numpy(), minlength=table.num_centers).astype(np.int64)
    return CheckpointStore(
        run,
        every_steps=config.checkpoint.every_steps,
        keep_last=config.checkpoint.keep_last,
        names=table.names,
        sizes=sizes,
    )
