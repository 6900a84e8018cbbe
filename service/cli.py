"""`mlcd serve`."""

import asyncio
import errno
import logging
import signal
import socket

import click
import uvicorn

from mlcd.errors import ConfigInvalid, Conflict
from service.app import create_app
from service.resources import open_resources
from service.settings import Settings, read_settings

_GRACE_S = 3
_BACKLOG = 2048


@click.command()
@click.option("--model", help="A directory made by `mlcd export`, other weights, an .onnx file with its JSON, hog.")
@click.option("--centers", help="Centers to label with; default: those shipped with the model.")
@click.option("--state", "state_dir", help="Directory of collections/NAME made by `mlcd index`.")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.  [default: 8000]")
def serve(**options: object) -> None:
    """Serve a model over REST. Every option is also an environment variable: MLCD_MODEL, MLCD_PORT, …"""
    settings = read_settings(options)
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
        config = uvicorn.Config(
            create_app(resources),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        centers = len(resources.centers.vectors) if resources.centers else 0
        click.echo(
            f"serving {resources.encoder.name} ({resources.encoder.engine}, {centers} centers, collections:"
            f" {', '.join(resources.collections) or 'none'}) on http://{shown}:{port}",
        )
        # uvicorn raises the signal again when it has drained; what is open here is still to be closed.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        await uvicorn.Server(config).serve(sockets=[listener])
