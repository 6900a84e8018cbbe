"""The first steps of a server process, before it imports the application: it starts its engines."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mlcd.child import STOPS
from mlcd.encoders import has_text
from mlcd.images.quiet import silence_decoders
from mlcd.service.host.allocator import pause_collector, return_large_blocks
from mlcd.service.host.signals import end_while_it_starts
from mlcd.service.host.threads import ThreadBudget
from mlcd.service.inference.engine.launched import LaunchedEngine
from mlcd.service.inference.engine.process import StartedEngine, start_engine
from mlcd.service.inference.find_model import find_model
from mlcd.service.inference.served import EngineOptions
from mlcd.service.settings import Settings
from mlcd.service.telemetry.logs import configure_logs

Stops: TypeAlias = tuple[signal.Signals, ...]  # the signals that end a process


@dataclass(frozen=True)
class StartedModel:
    """A model that its engines' processes are opening.

    engine, texts: processes of its image and text tower; None with Triton, or without a text tower.
    """

    folder: str
    engine: StartedEngine | None
    texts: StartedEngine | None


def prepare_process(settings: Settings, *, stops: Stops = STOPS) -> None:
    """Prepares a server process. stops: see `serve_on`."""
    return_large_blocks()
    pause_collector()
    silence_decoders()
    configure_logs(settings.log)
    end_while_it_starts(stops[0])


def start_model(
    settings: Settings, announce: Callable[[str], None], launched: LaunchedEngine | None = None
) -> StartedModel:
    """Orders the engines' processes to open the model.

    announce: called with a message before an export. launched: process of the first engine; None
    launches one.
    """
    folder = find_model(settings, announce)
    if settings.engine == "triton":
        if launched is not None:
            launched.dismiss()
        return StartedModel(folder, None, None)
    threads = ThreadBudget.of(settings).engine
    images = start_engine(
        EngineOptions.from_settings(settings, folder, num_threads=threads), launched
    )
    texts = None
    if has_text(folder):
        texts = start_engine(
            EngineOptions.from_settings(settings, folder, num_threads=threads, tower="texts")
        )
    return StartedModel(folder, images, texts)
