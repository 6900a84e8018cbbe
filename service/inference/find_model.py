"""Finds the model that an engine opens, from the settings."""

from collections.abc import Callable

from mlcd.pipelines.resolve import resolve_model
from mlcd.service.settings import Settings


def find_model(settings: Settings, announce: Callable[[str], None] = lambda _: None) -> str:
    """Returns the model that the engine opens, exporting foreign weights first.

    An export takes minutes and must not run in an event loop. announce: called with a message
    before an export.
    """
    if settings.engine in ("fake", "triton"):
        return settings.model
    return resolve_model(settings.model, announce)
