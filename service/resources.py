"""Settings to open resources: the one composition root of the service, closed in reverse."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mlcd.artifact import MANIFEST
from mlcd.clustering.centers import Centers
from mlcd.clustering.nearest import CenterScan
from mlcd.collections.snapshot import Snapshot
from mlcd.cores import available_cores
from mlcd.encoders import open_encoder
from mlcd.encoders.base import Encoder
from mlcd.errors import ConfigInvalid
from mlcd.images.decode import DecodeLimits
from mlcd.pipelines.resolve import resolve_model
from service.dispatch.batcher import MicroBatcher
from service.dispatch.pipeline import Pipeline
from service.observability.metrics import Metrics
from service.settings import Settings


@dataclass(frozen=True)
class Resources:
    """What the routes work with."""

    settings: Settings
    encoder: Encoder
    centers: Centers | None
    scan: CenterScan | None
    """Of the centers: checked and measured once."""
    collections: dict[str, Snapshot]
    batcher: MicroBatcher
    pipeline: Pipeline
    compute: ThreadPoolExecutor
    """For label look-up and search, which are too long for the event loop."""
    metrics: Metrics


@asynccontextmanager
async def open_resources(
    settings: Settings, announce: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Resources]:
    """Open model, centers and collections; refuse those of another fingerprint.

    announce: told when weights are exported first, which takes a while.
    """
    model = resolve_model(settings.model, announce)
    encoder = open_encoder(
        model,
        precision=settings.precision,
        engine=settings.engine,
        num_threads=settings.engine_threads,
        exif=settings.exif,
        decode=settings.decode,
    )
    num_cores = available_cores()
    decoders = ThreadPoolExecutor(settings.decode_threads or num_cores, thread_name_prefix="decode")
    compute = ThreadPoolExecutor(num_cores, thread_name_prefix="compute")
    try:
        metrics = Metrics(
            model=encoder.name,
            fingerprint=encoder.fingerprint,
            engine=encoder.engine,
            precision=encoder.precision,
        )
        limits = settings.limits
        batcher = MicroBatcher(
            encoder, max_batch=settings.max_batch, max_queued=limits.max_queued_images, metrics=metrics
        )
        pipeline = Pipeline(
            batcher,
            decoders,
            preprocess=encoder.preprocess,
            dimension=encoder.dimension,
            limits=DecodeLimits(max_bytes=limits.max_body_bytes, max_pixels=limits.max_pixels),
            max_admitted=limits.max_queued_images,
            metrics=metrics,
        )
        centers = _open_centers(settings, model, encoder)
        # numpy: the service never loads torch, and the labels are the same by any arithmetic.
        scan = None if centers is None else CenterScan(centers.vectors, products="numpy")
        collections = _open_collections(settings, encoder)
        async with batcher:
            yield Resources(settings, encoder, centers, scan, collections, batcher, pipeline, compute, metrics)
    finally:
        decoders.shutdown(wait=False, cancel_futures=True)
        compute.shutdown(wait=False, cancel_futures=True)
        encoder.close()


def _open_centers(settings: Settings, model: str, encoder: Encoder) -> Centers | None:
    shipped = Path(model) / "centers"
    if settings.centers is None and not (shipped / MANIFEST).is_file():
        return None
    path = Path(settings.centers) if settings.centers is not None else shipped
    centers = Centers.open(path)
    if centers.fingerprint != encoder.fingerprint:
        raise ConfigInvalid(
            f"the centers {path} are in the space of another model ({centers.fingerprint[:12]}, served"
            f" {encoder.fingerprint[:12]})",
            remedy="use the centers shipped with the model, or cluster its own embeddings",
        )
    return centers


def _open_collections(settings: Settings, encoder: Encoder) -> dict[str, Snapshot]:
    if settings.state_dir is None:
        return {}
    folder = Path(settings.state_dir) / "collections"
    collections = {}
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        snapshot = Snapshot.open(manifest.parent)
        snapshot.check_fingerprint(encoder.fingerprint)
        collections[manifest.parent.name] = snapshot
    return collections
