"""One server process: it opens resources, serves an application on a socket, and ends by a signal.

It is the process of the command, or one of several under a supervisor, as `python -m
mlcd.service.serve.server`. There standard input brings one line of JSON, `Order`; standard output
takes {"serving", "identity"} when it serves, or {"error", "message", "remedy"}. It reads the
settings from the supervisor's sources, so that no secret is written anywhere. The signal FINISH,
and the supervisor's death, make it finish what is in flight and end.
"""

import asyncio
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from mlcd.child import STOPS, Message, Parent, serve_parent
from mlcd.errors import ConfigInvalid
from mlcd.service.explore.exploration_thread import Exploration
from mlcd.service.host.allocator import keep_what_is_imported, keep_what_is_open
from mlcd.service.host.open_files import BACKLOG, affordable
from mlcd.service.host.signals import FINISH, StopSignals, cancel_on_signal
from mlcd.service.http.app import create_app
from mlcd.service.http.batch_runner import run_batches
from mlcd.service.http.connections import ConnectionBounds, HttpConnection
from mlcd.service.resources import Resources, open_resources
from mlcd.service.serve.exploring import run_exploration
from mlcd.service.serve.preparation import Begun, Stops, begin, prepare_process
from mlcd.service.settings import Settings, read_settings
from mlcd.service.telemetry.metrics import use_multiprocess_dir
from mlcd.service.timings import SERVER_CLOSE_S

# Called with an exploration that has begun and with what ends the server; returns its own task.
Watch: TypeAlias = Callable[[Exploration, Callable[[], None]], "asyncio.Task[None]"]


def bound_s(settings: Settings) -> float:
    """Returns the seconds after a signal within which a server process has ended."""
    return settings.drain_s + settings.grace_s + SERVER_CLOSE_S


def serve_on(
    listener: socket.socket,
    settings: Settings,
    begun: Begun,
    *,
    serving: Callable[[Resources], None],
    multiprocess_dir: Path | None = None,
    identity: str | None = None,
    stops: Stops = STOPS,
    watch: Watch | None = None,
) -> None:
    """Serves until one of the signals `stops`.

    serving: called when everything is open. watch: begins to watch the exploration, if there is
    one, and may end the server.
    multiprocess_dir: see `Metrics`. identity: the `identity_of` that the resources must have; else
    it raises ConfigInvalid.
    """
    keep_what_is_imported()
    # uvloop where it is installed: it exists for Linux and macOS
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(
            _serve(listener, settings, begun, serving, multiprocess_dir, identity, stops, watch)
        )


async def _serve(
    listener: socket.socket,
    settings: Settings,
    begun: Begun,
    serving: Callable[[Resources], None],
    multiprocess_dir: Path | None,
    identity: str | None,
    stops: Stops,
    watch: Watch | None,
) -> None:
    with cancel_on_signal(within_s=SERVER_CLOSE_S, stops=stops):
        async with open_resources(
            settings,
            begun.folder,
            multiprocess_dir=multiprocess_dir,
            started=begun.engine,
            texts=begun.texts,
        ) as resources:
            if identity not in (None, identity_of(resources)):
                raise ConfigInvalid(
                    "the model or its centers on disk changed since the start",
                    remedy="restart the server",
                )
            app = create_app(resources)
            server = _server(app, resources, stops)
            keep_what_is_open()
            serving(resources)
            del resources  # a switch must be able to free the model
            async with run_batches(app, app.state.resources.batches):
                with run_exploration(app) as exploration:
                    if exploration is not None and watch is not None:
                        watching = watch(exploration, server.finish)
                    await server.serve(sockets=[listener])
                    if exploration is not None and watch is not None:
                        watching.cancel()
                        await asyncio.wait([watching])  # it may have a last word


def _server(app: FastAPI, resources: Resources, stops: Stops) -> "_Server":
    """Returns a server that ends by one of `stops`."""
    settings = resources.settings
    limits = settings.limits
    most = affordable(limits.max_connections)
    bounds = ConnectionBounds(
        max_connections=most, exchange_s=limits.deadline_s, metrics=resources.metrics
    )
    config = uvicorn.Config(
        app,
        # It is called like the class that uvicorn expects.
        http=partial(HttpConnection, bounds=bounds),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,  # our configuration holds for its lines, too
        log_level="error",  # faults of connections are only counted: clients must not fill a log
        access_log=False,
        proxy_headers=False,  # nothing depends on the client's address or scheme
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.grace_s),
    )
    server = _Server(config)
    stop = _Stop(server, app, settings)
    for number in stops:
        asyncio.get_running_loop().add_signal_handler(number, stop.request_stop, number)
    return server


def identity_of(resources: Resources) -> str:
    """Returns a text that is equal for processes whose answers are equal."""
    centers = resources.centers.digest if resources.centers else "-"
    return f"{resources.encoder.fingerprint} {centers}"


def describe(resources: Resources) -> str:
    """Describes what is served, for people."""
    centers = len(resources.centers.vectors) if resources.centers else 0
    collections = ", ".join(resources.collections) or "none"
    encoder = resources.encoder
    return f"{encoder.name} ({encoder.engine}, {centers} centers, collections: {collections})"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `_Stop`: the server must go on serving for a while after one."""
        yield

    def finish(self) -> None:
        """Ends the server once its requests are answered; call it from any thread."""
        self.should_exit = True


class _Stop:
    """The shutdown of a server, in order.

    It reports not-ready, keeps serving for `drain_s`, finishes requests in flight, and exits.
    """

    def __init__(self, server: uvicorn.Server, app: FastAPI, settings: Settings) -> None:
        self._server, self._app, self._settings = server, app, settings
        self._signals = StopSignals()

    def request_stop(self, number: int) -> None:
        """Begins the shutdown on a signal; a second one ends this process and the engine's."""
        if not self._signals.begins(number):
            return
        resources: Resources = self._app.state.resources
        resources.readiness.draining = True
        asyncio.get_running_loop().call_later(self._settings.drain_s, self._stop_listening)
        # The end is bounded, even where a decoder's thread or the loop hangs.
        last = threading.Timer(bound_s(self._settings), os._exit, (1,))
        last.daemon = True
        last.start()

    def _stop_listening(self) -> None:
        self._server.should_exit = True


@dataclass(frozen=True)
class SettingsSources:
    """The sources of settings beside the environment: command-line options and a file."""

    options: dict[str, object]
    file: str | None


@dataclass(frozen=True)
class Order:
    """The supervisor's message to a new server process.

    descriptor: that of the listening socket. slot: 0 to processes - 1. multiprocess_dir: the
    directory of all processes' metrics. identity: the `identity_of` that the process must have,
    None for the first one.
    """

    source: SettingsSources
    descriptor: int
    slot: int
    multiprocess_dir: str
    identity: str | None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Order":
        return cls(**{**fields, "source": SettingsSources(**fields["source"])})


def serve(message: Message, supervisor: Parent) -> None:
    """Serves on the supervisor's socket, and tells it once everything is open."""

    def serving(resources: Resources) -> None:
        supervisor.send({"serving": describe(resources), "identity": identity_of(resources)})

    order = Order.from_dict(message)
    settings = read_settings(order.source.options, file=order.source.file)
    prepare_process(settings, stops=(FINISH,))
    use_multiprocess_dir(Path(order.multiprocess_dir), order.slot)
    serve_on(
        socket.socket(fileno=order.descriptor),
        settings,
        begin(settings, lambda line: click.echo(f"mlcd: {line}", err=True)),
        serving=serving,
        multiprocess_dir=Path(order.multiprocess_dir),
        identity=order.identity,
        stops=(FINISH,),
    )


if __name__ == "__main__":
    serve_parent(serve, at_its_end=FINISH)
