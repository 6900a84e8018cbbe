"""Runs the exploration of a server, which serves the exploration's collection and centers."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import open_artifact
from mlcd.pipelines.stored_rows import StoredRows, holds_embeddings
from mlcd.service.explore.exploration_thread import Exploration, ExplorationParts
from mlcd.service.explore.place_state import COLLECTION, PlaceState
from mlcd.service.inference.dispatched_encoder import DispatchedEncoder
from mlcd.service.inference.lookup import Lookup
from mlcd.service.inference.model_data import check_centers
from mlcd.service.inference.stored_names import StoredNames
from mlcd.service.resources import Resources
from mlcd.service.timings import EXPLORE_END_S

_log = logging.getLogger("mlcd.explore")


@contextmanager
def run_exploration(app: FastAPI) -> Iterator[Exploration | None]:
    """Runs the exploration of the app's settings within the context; yields None without one.

    Enter it in the event loop that serves the app.
    """
    resources: Resources = app.state.resources
    exploration = _open_exploration(app, resources)
    app.state.exploration = exploration
    if exploration is None:
        yield None
        return
    exploration.start()
    try:
        yield exploration
    finally:
        exploration.stop()
        exploration.join(EXPLORE_END_S)


def _open_exploration(app: FastAPI, resources: Resources) -> Exploration | None:
    settings = resources.settings
    place, state_dir, model = settings.explore.place, settings.state_dir, settings.model
    if place is None or state_dir is None:
        return None
    encoder, loop = resources.encoder, asyncio.get_running_loop()
    state = PlaceState(Path(state_dir))
    facts = state.read_or_create(place, model)
    if settings.explore.clusters is not None:
        facts = state.update(facts, clusters=settings.explore.clusters)
    store = resources.model.data.require_store()
    existing = store.find(COLLECTION)
    if existing is not None and existing.fingerprint != encoder.fingerprint:
        _log.warning("%s is explored again, because the model has changed", place)
        state.remove_clustering()
        state.pictures.unlink(missing_ok=True)
        store.delete(COLLECTION)
    collection, _ = store.create(
        COLLECTION, fingerprint=encoder.fingerprint, dimension=encoder.dimension
    )
    parts = ExplorationParts(
        encoder=DispatchedEncoder(encoder, resources.dispatcher, loop),
        stored_rows=StoredRows(Path(model)) if holds_embeddings(model) else None,
        collection=collection,
        serve_centers=partial(_serve_centers, app, loop, state.path),
        read_given_names=partial(_read_given_names, state.path),
        set_name=partial(_set_name, state.path),
        has_texts=resources.texts is not None,
        thumbnail_side=settings.thumbnails.side,
    )
    return Exploration(state, facts, parts)


def _read_given_names(state_dir: Path, centers: Path) -> dict[int, str]:
    names = StoredNames(open_artifact(centers), state_dir).read().names
    return {center: name for center in names.by_hand if (name := names.names[center]) is not None}


def _set_name(state_dir: Path, centers: Path, center: int, name: str) -> None:
    StoredNames(open_artifact(centers), state_dir).rename(center, name)


def _serve_centers(
    app: FastAPI, loop: asyncio.AbstractEventLoop, state_dir: Path, path: Path
) -> None:
    """Serves the centers at `path` from now on; requests in flight keep the former centers."""
    artifact = open_artifact(path, "centers")
    centers = Centers.read(artifact)
    check_centers(path, centers, app.state.resources.encoder.fingerprint)
    lookup = Lookup(centers, artifact, state_dir)
    asyncio.run_coroutine_threadsafe(_publish(app, lookup), loop).result()


async def _publish(app: FastAPI, lookup: Lookup) -> None:
    resources: Resources = app.state.resources
    data = replace(resources.model.data, lookup=lookup, foreign_centers=None)
    app.state.resources = replace(resources, model=replace(resources.model, data=data))
