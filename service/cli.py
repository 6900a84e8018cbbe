"""`mlcd serve`."""

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import click
import uvicorn

from mlcd.errors import ConfigInvalid, Conflict
from mlcd.images.quiet import silence_decoders
from service.app import create_app
from service.connections import Bounds, Connection, allow_descriptors
from service.memory import return_large_blocks
from service.resources import Resources, open_resources
from service.settings import Settings, read_settings

_BACKLOG: Final = 2048
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_MARGIN_S: Final = 3.0  # to cancel what is left, and to close everything


@click.command()
@click.option("--model", help="A directory made by `mlcd export`, other weights, an .onnx file with its JSON, hog.")
@click.option("--centers", help="Centers to label with; default: those shipped with the model.")
@click.option("--state", "state_dir", help="Directory of collections/NAME made by `mlcd index`.")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.  [default: 8000]")
def serve(**options: object) -> None:
    """Serve a model over REST. Every option is also an environment variable: MLCD_MODEL, MLCD_PORT, …"""
    settings = read_settings(options)
    return_large_blocks()
    allow_descriptors()
    silence_decoders()
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it remarks on every odd byte that it is sent
    # Loading a model takes a while, in which a SIGTERM must be heard too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.WARNING)
    listener = _listen(settings)
    try:
        asyncio.run(_serve(settings, listener))
    finally:
        listener.close()


def _listen(settings: Settings) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Taken over by every connection: an answer's body must not wait for its head to be acknowledged, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)  # from here on nobody else can take the port
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"port {settings.port} is in use", remedy="give another with --port") from error
        raise ConfigInvalid(
            f"cannot listen on {settings.host}:{settings.port}", remedy="give another --host or --port"
        ) from error
    return listener


async def _serve(settings: Settings, listener: socket.socket) -> None:
    async with open_resources(settings, lambda line: click.echo(f"mlcd: {line}", err=True)) as resources:
        limits = settings.limits
        bounds = Bounds(most=limits.max_connections, exchange_s=limits.deadline_s, metrics=resources.metrics)
        config = uvicorn.Config(
            create_app(resources),
            http=partial(Connection, bounds=bounds),  # type: ignore[arg-type]  # called as a class would be
            ws="none",
            lifespan="off",
            log_level="error",  # what a connection sent is counted: clients must not fill a log
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(settings.grace_s),
        )
        server = _Server(config)
        stop = _Stop(server, resources)
        for number in _STOPS:
            asyncio.get_running_loop().add_signal_handler(number, stop.requested, number)
        _announce(resources, listener)
        await server.serve(sockets=[listener])


def _announce(resources: Resources, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    centers = len(resources.centers.vectors) if resources.centers else 0
    click.echo(
        f"serving {resources.encoder.name} ({resources.encoder.engine}, {centers} centers, collections:"
        f" {', '.join(resources.collections) or 'none'}) on http://{shown}:{port}",
    )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: the server has to go on serving for a while after one."""
        yield


class _Stop:
    """The end of serving: not ready at once, served for a while still, then what is in flight, and no longer."""

    def __init__(self, server: uvicorn.Server, resources: Resources) -> None:
        self._server, self._resources = server, resources
        self._under_way = False

    def requested(self, number: int) -> None:
        """By a signal; a second one ends the process as it would have without us, and the engine's ends with it."""
        if self._under_way:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._under_way = True
        settings = self._resources.settings
        self._resources.readiness.draining = True
        asyncio.get_running_loop().call_later(settings.drain_s, self._stop_listening)
        # Whatever hangs, a decoder's thread or the loop itself: the end is bounded.
        last = threading.Timer(settings.drain_s + settings.grace_s + _MARGIN_S, os._exit, (1,))
        last.daemon = True
        last.start()

    def _stop_listening(self) -> None:
        self._server.should_exit = True
