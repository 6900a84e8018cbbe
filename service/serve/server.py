"""One server process: it opens resources, serves an application on a socket, and ends by a signal.

It is the process of the command, or one of several under a supervisor, as `python -m
mlcd.service.serve.server`. The supervisor sends one line of JSON, `Order`, to standard input; the
process writes {"serving", "identity"} to standard output when it serves, or {"error", "message",
"remedy"}. It reads the settings from the same sources as the supervisor, so that no secret is
passed on. On the signal FINISH, or if the supervisor dies, it finishes requests in flight and ends.
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
from mlcd.service.serve.preparation import StartedModel, Stops, prepare_process, start_model
from mlcd.service.settings import Settings, read_settings
from mlcd.service.telemetry.metrics import use_multiprocess_dir
from mlcd.service.timings import SERVER_CLOSE_S

# called with a started exploration and a function that ends the server; returns its task
Watch: TypeAlias = Callable[[Exploration, Callable[[], None]], "asyncio.Task[None]"]


def bound_s(settings: Settings) -> float:
    """Returns the seconds after a signal within which a server process must end."""
    return settings.drain_s + settings.grace_s + SERVER_CLOSE_S


def serve_on(
    listener: socket.socket,
    settings: Settings,
    model: StartedModel,
    *,
    serving: Callable[[Resources], None],
    multiprocess_dir: Path | None = None,
    identity: str | None = None,
    stops: Stops = STOPS,
    watch: Watch | None = None,
) -> None:
    """Serves until one of the signals `stops`.

    serving: called when everything is open. multiprocess_dir: see `Metrics`. identity: value of
    `identity_of` that the resources must have; another value raises ConfigInvalid. watch: starts to
    watch the exploration, if there is one, and may end the server.
    """
    keep_what_is_imported()
    # with uvloop if it is installed, which exists for Linux and macOS
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(
            _serve(listener, settings, model, serving, multiprocess_dir, identity, stops, watch)
        )


async def _serve(
    listener: socket.socket,
    settings: Settings,
    model: StartedModel,
    serving: Callable[[Resources], None],
    multiprocess_dir: Path | None,
    identity: str | None,
    stops: Stops,
    watch: Watch | None,
) -> None:
    with cancel_on_signal(within_s=SERVER_CLOSE_S, stops=stops):
        async with open_resources(
            settings,
            model.folder,
            multiprocess_dir=multiprocess_dir,
            started=model.engine,
            texts=model.texts,
        ) as resources:
            if identity not in (None, identity_of(resources)):
                raise ConfigInvalid(
                    "the model or its centers on disk changed since the start",
                    remedy="restart the server",
                )
            app = create_app(resources)
            server = _make_server(app, resources, stops)
            keep_what_is_open()
            serving(resources)
            del resources  # a switch must be able to free the model
            async with run_batches(app, app.state.resources.batches):
                with run_exploration(app) as exploration:
                    if exploration is not None and watch is not None:
                        watch_task = watch(exploration, server.finish)
                    await server.serve(sockets=[listener])
                    if exploration is not None and watch is not None:
                        watch_task.cancel()
                        await asyncio.wait([watch_task])  # it may print a last line


def _make_server(app: FastAPI, resources: Resources, stops: Stops) -> "_Server":
    """Returns a server that ends by one of the signals `stops`."""
    settings = resources.settings
    limits = settings.limits
    most = affordable(limits.max_connections)
    bounds = ConnectionBounds(
        max_connections=most, exchange_s=limits.deadline_s, metrics=resources.metrics
    )
    config = uvicorn.Config(
        app,
        # a partial, which uvicorn calls as it would call the class that it expects
        http=partial(HttpConnection, bounds=bounds),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,  # our configuration applies to its lines, too
        log_level="error",  # connection errors are only counted: clients must not fill a log
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
    """Returns a text that is equal for processes that give equal answers."""
    centers = resources.centers.digest if resources.centers else "-"
    return f"{resources.encoder.fingerprint} {centers}"


def describe(resources: Resources) -> str:
    """Describes the served model in one line."""
    centers = len(resources.centers.vectors) if resources.centers else 0
    collections = ", ".join(resources.collections) or "none"
    encoder = resources.encoder
    return f"{encoder.name} ({encoder.engine}, {centers} centers, collections: {collections})"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `_Stop`, because the server must keep serving for a while after one."""
        yield

    def finish(self) -> None:
        """Ends the server after its requests are answered; call it from any thread."""
        self.should_exit = True


class _Stop:
    """Shuts a server down: it reports not-ready, keeps serving for `drain_s`, finishes requests in
    flight, and exits.
    """

    def __init__(self, server: uvicorn.Server, app: FastAPI, settings: Settings) -> None:
        self._server, self._app, self._settings = server, app, settings
        self._signals = StopSignals()

    def request_stop(self, number: int) -> None:
        """Starts the shutdown on a signal; a second signal ends this process and the engine's."""
        if not self._signals.begins(number):
            return
        resources: Resources = self._app.state.resources
        resources.readiness.draining = True
        asyncio.get_running_loop().call_later(self._settings.drain_s, self._stop_listening)
        # Ends the process even if a decoder's thread or the loop hangs.
        exit_timer = threading.Timer(bound_s(self._settings), os._exit, (1,))
        exit_timer.daemon = True
        exit_timer.start()

    def _stop_listening(self) -> None:
        self._server.should_exit = True


@dataclass(frozen=True)
class SettingsSources:
    """The sources of settings in addition to the environment: command-line options and a file."""

    options: dict[str, object]
    file: str | None


@dataclass(frozen=True)
class Order:
    """The supervisor's message to a new server process.

    descriptor: file descriptor of the listening socket. slot: 0 to processes - 1. multiprocess_dir:
    directory for the metrics of all processes. identity: value of `identity_of` that the process
    must have, None for the first process.
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
    """Serves on the supervisor's socket, and reports to it when everything is open."""

    def serving(resources: Resources) -> None:
        supervisor.send({"serving": describe(resources), "identity": identity_of(resources)})

    order = Order.from_dict(message)
    settings = read_settings(order.source.options, file=order.source.file)
    prepare_process(settings, stops=(FINISH,))
    use_multiprocess_dir(Path(order.multiprocess_dir), order.slot)
    serve_on(
        socket.socket(fileno=order.descriptor),
        settings,
        start_model(settings, lambda line: click.echo(f"mlcd: {line}", err=True)),
        serving=serving,
        multiprocess_dir=Path(order.multiprocess_dir),
        identity=order.identity,
        stops=(FINISH,),
    )


if __name__ == "__main__":
    serve_parent(serve, at_its_end=FINISH)
