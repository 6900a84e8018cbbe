"""The model that an engine opens, by what the settings name."""

from collections.abc import Callable

from mlcd.pipelines.resolve import resolve_model
from mlcd.service.settings import Settings


def find_model(settings: Settings, announce: Callable[[str], None] = lambda _: None) -> str:
    """Returns the model that the engine opens, after an export of other weights.

    An export takes minutes and must not run in an event loop. announce: is called before it.
    """
    if settings.engine in ("fake", "triton"):
        return settings.model
    return resolve_model(settings.model, announce)
