"""Cached embeddings, by a frozen image tower, of the augmented crops of the first epochs; later
epochs use these views in rotation.

view-00000.npy   float32 [n, D], embeddings of each image's crop in the first epoch; NaN in the rows
                 of images that cannot be decoded
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.errors import ConfigInvalid
from mlcd.models.servable import Servable
from mlcd.pipelines.encoded import images_parent
from mlcd.progress import Meter, Stages
from mlcd.training.data.loader import Batch, Loader
from mlcd.training.pairs.pairs_config import PairsConfig
from mlcd.training.pairs.pairs_dataset import PairSet
from mlcd.training.pairs.pairs_state import embed_crops
from mlcd.training.parallel.backbone import Backbone
from mlcd.training.processes import Processes

_BATCH: Final = 64


@dataclass(frozen=True)
class Views:
    """A reader of the embeddings of all views.

    rows: for each view its embeddings, float32 [n, D].
    """

    artifact: Artifact
    rows: tuple[NDArray[np.float32], ...]

    def at(self, indices: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Returns the embeddings of images `indices` at stream `positions`, float32 [b, D].

        Rows of images that cannot be decoded are NaN.
        """
        views = positions // len(self.rows[0]) % len(self.rows)
        rows = [self.rows[view][index] for view, index in zip(views, indices, strict=True)]
        return torch.from_numpy(np.stack(rows) if rows else self.rows[0][:0].copy())


def image_views(
    config: PairsConfig, model: Servable, pairs: PairSet, processes: Processes, reporter: Stages
) -> Views:
    """Opens the views of the images by `model`, and first creates them if they do not exist.

    Raises ConfigInvalid if they do not exist and several processes run.
    """
    out = Path(config.data.embeddings or f"{config.out}-views")
    request = _request(config, model, pairs, out)
    artifact = find_published(out, request)
    if artifact is None:
        if processes.world.size > 1:
            raise ConfigInvalid(
                f"{out} must exist before several processes train",
                remedy="first run the same command without torchrun, which creates it",
            )
        artifact = _create(config, model, pairs, processes, reporter, Draft(out, request))
    names = map(_name, range(config.data.cached_views))
    return Views(artifact, tuple(np.load(artifact.file(name), mmap_mode="r") for name in names))


def _request(config: PairsConfig, model: Servable, pairs: PairSet, out: Path) -> Request:
    settings = {
        "views": config.data.cached_views,
        "seed": config.seed,
        "decode": config.data.decode,
        "precision": config.compute.precision,
        "augment": config.augment.model_dump(mode="json"),
        "rows": hashlib.sha256(pairs.caption_rows.tobytes()).hexdigest(),
    }
    return Request("views", settings, (images_parent(pairs.source, out),), model.fingerprint())


def _create(
    config: PairsConfig,
    model: Servable,
    pairs: PairSet,
    processes: Processes,
    reporter: Stages,
    draft: Draft,
) -> Artifact:
    """Creates the views one after another; after an interruption, finished views are kept."""
    tower = Backbone(
        model.to(processes.device), processes.world, precision=config.compute.precision
    )
    num, views = len(pairs), config.data.cached_views
    with draft:
        num_done = next((view for view in range(views) if not draft.has(_name(view))), views)
        with reporter.stage("embed views", num * views, done=num * num_done) as meter:
            for view in range(num_done, views):
                rows = _embed_view(config, tower, pairs, view, processes.device, meter)
                with draft.write(_name(view)) as path, path.open("wb") as file:
                    np.save(file, rows, allow_pickle=False)
        return draft.publish(summary={"images": num, "views": views})


@torch.no_grad()
def _embed_view(
    config: PairsConfig,
    tower: Backbone,
    pairs: PairSet,
    view: int,
    device: torch.device,
    meter: Meter,
) -> NDArray[np.float32]:
    rows = np.full((len(pairs), config.model.output_dim), np.nan, dtype=np.float32)
    first = view * len(pairs)
    for batch in _iter_crops(config, pairs, first, first + len(pairs), device):
        in_view = (batch.positions >= first) & (batch.positions < first + len(pairs))
        embeddings = embed_crops(tower, batch.images.to(device), batch.positions, config)
        rows[batch.labels[:, 0].numpy()[in_view]] = embeddings.float().cpu().numpy()[in_view]
        meter.advance(int(in_view.sum()))
    return rows


def _iter_crops(
    config: PairsConfig, pairs: PairSet, first: int, stop: int, device: torch.device
) -> Iterator[Batch]:
    """Yields the crops at stream positions [first, stop), in whole batches that may exceed it."""
    steps = {"batch_size": _BATCH, "steps": -(-stop // _BATCH)}
    view_config = config.model_copy(
        update={
            "schedule": config.schedule.model_copy(update=steps),
            "compute": config.compute.model_copy(update={"accumulation": 1}),
        }
    )
    dataset = pairs.as_dataset()
    start = first // _BATCH
    with Loader(dataset, view_config, rank=0, size=1, start_step=start, device=device) as loader:
        for step in loader:
            yield from step.parts


def _name(view: int) -> str:
    return f"view-{view:05d}.npy"
