"""The route that describes the served model and the limits."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from mlcd.images.decode import list_formats
from mlcd.service.http.access import AppResources, sees
from mlcd.service.http.answers import headers, provenance
from mlcd.service.http.auth import needs
from mlcd.service.inference.lookup import Lookup
from mlcd.service.inference.served_texts import ServedTexts
from mlcd.service.resources import Resources
from mlcd.version import __version__
from mlcd.wire.embedding import PairCalibration
from mlcd.wire.nearest_centers import Audit
from mlcd.wire.served_model import CenterSet, DescribedTexts, Info

router = APIRouter(tags=["info"])


@router.get("/v1/info", dependencies=[needs()])
async def info(request: Request, resources: AppResources, response: Response) -> Info:
    """Describes the model, preprocessing, engine, centers, collections and limits."""
    encoder, store = resources.encoder, resources.model.data.store
    response.headers.update(headers(resources))
    return Info(
        **provenance(resources),
        version=__version__,
        dimension=encoder.dimension,
        engine=encoder.engine,
        precision=encoder.precision,
        preprocess=asdict(encoder.preprocess),
        image_formats=[*list_formats()],
        texts=None if resources.texts is None else _describe_texts(resources.texts),
        centers=None
        if resources.lookup is None
        else _describe_centers(resources, resources.lookup),
        collections=sorted(name for name in resources.collections if sees(name, request)),
        creates_collections=store is not None and store.writable,
        limits=resources.settings.limits.model_dump(),
    )


def _describe_texts(texts: ServedTexts) -> DescribedTexts:
    encoder = texts.encoder
    return DescribedTexts(
        context_length=encoder.context_length,
        engine=encoder.engine,
        precision=encoder.precision,
        calibration=PairCalibration(**asdict(encoder.calibration)),
    )


def _describe_centers(resources: Resources, lookup: Lookup) -> CenterSet:
    engine_labels = resources.model.engine.labels_of == lookup.centers.digest
    return CenterSet(
        digest=lookup.centers.digest,
        num_centers=len(lookup.centers.vectors),
        modes=[*lookup.modes],
        audit=None if lookup.approximation is None else Audit(**lookup.approximation.audit),
        labels_by="engine" if engine_labels else "server",
    )
