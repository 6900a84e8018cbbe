"""The first steps of a server process, which need no application: its engine opens meanwhile."""

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
from mlcd.service.inference.served import Opening
from mlcd.service.settings import Settings
from mlcd.service.telemetry.logs import configure_logs

Stops: TypeAlias = tuple[signal.Signals, ...]  # the signals that end a process


@dataclass(frozen=True)
class Begun:
    """The model that is going to be served. engine, texts: the processes of its towers; None where
    they are Triton's, or it reads no texts.
    """

    folder: str
    engine: StartedEngine | None
    texts: StartedEngine | None


def prepare_process(settings: Settings, *, stops: Stops = STOPS) -> None:
    """Prepares a process that is going to serve. stops: those of `serve_on`."""
    return_large_blocks()
    pause_collector()
    silence_decoders()
    configure_logs(settings.log)
    end_while_it_starts(stops[0])


def begin(
    settings: Settings, announce: Callable[[str], None], launched: LaunchedEngine | None = None
) -> Begun:
    """Has the engines' processes open the model.

    announce: called before an export. launched: the process, where it runs already.
    """
    folder = find_model(settings, announce)
    if settings.engine == "triton":
        if launched is not None:
            launched.dismiss()
        return Begun(folder, None, None)
    threads = ThreadBudget.of(settings).engine
    images = start_engine(Opening.by(settings, folder, num_threads=threads), launched)
    texts = None
    if has_text(folder):
        texts = start_engine(Opening.by(settings, folder, num_threads=threads, tower="texts"))
    return Begun(folder, images, texts)
