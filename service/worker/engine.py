"""Settings to what a worker opens once, for all pieces that it does: the engine, in this process, and the centers."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import cast

from mlcd.artifact import open_artifact
from mlcd.clustering.centers import Centers
from mlcd.encoders import open_encoder
from mlcd.encoders.base import Encoder, EngineName
from mlcd.pipelines.resolve import resolve_model
from mlcd.pipelines.shard import CenterSet, Equipment
from service.host.threads import ThreadBudget, limit_blas
from service.inference.engine.fake import FakeEncoder
from service.inference.space import check_centers, find_centers
from service.settings import Settings
from service.worker.triton import IN_FLIGHT, opened_triton


@contextmanager
def open_equipment(settings: Settings, announce: Callable[[str], None]) -> Iterator[Equipment]:
    """announce: told when weights are exported first, which takes a while. Raises what opening the model raises, and
    ConfigInvalid for centers of another one.
    """
    threads = ThreadBudget.of(settings)
    limit_blas(threads.blas)
    if settings.engine == "triton":
        with opened_triton(settings) as encoder:
            centers = _open_centers(settings, settings.model, encoder)
            yield Equipment(encoder, centers, num_threads=threads.decode, in_flight=IN_FLIGHT)
        return
    folder = settings.model if settings.engine == "fake" else resolve_model(settings.model, announce)
    with closing(_open_encoder(settings, folder, threads)) as encoder:
        yield Equipment(encoder, _open_centers(settings, folder, encoder), num_threads=threads.decode)


def _open_encoder(settings: Settings, folder: str, threads: ThreadBudget) -> Encoder:
    if settings.engine == "fake":
        return FakeEncoder(folder)
    return open_encoder(
        folder,
        precision=settings.precision,
        engine=cast(EngineName, settings.engine),
        num_threads=threads.engine,
        exif=settings.exif,
        decode=settings.decode,
    )


def _open_centers(settings: Settings, folder: str, encoder: Encoder) -> CenterSet | None:
    path = find_centers(settings, folder)
    if path is None:
        return None
    artifact = open_artifact(path, "centers")
    centers = Centers.read(artifact)
    check_centers(path, centers, encoder.fingerprint)
    return CenterSet(artifact, centers)
