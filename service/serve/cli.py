"""The command `mlcd serve`."""

import asyncio
import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from mlcd.child import STOPS
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.service.host.allocator import keep_what_is_open, pause_collector
from mlcd.service.host.open_files import BACKLOG, allow_descriptors
from mlcd.service.host.signals import end_while_it_starts, ignore_hangups
from mlcd.service.inference.engine.launched import LaunchedEngine, launch_engine

if TYPE_CHECKING:  # slow imports come after the engine's launch
    from mlcd.service.settings import Auth, Settings

_NEXT_PORTS: Final = 20  # further ports to try if the port is in use
_MAX_PORT: Final = 65_535


@click.command()
@click.option(
    "--model",
    help="starter, a directory made by `mlcd export`, other weights, an .onnx file with its JSON,"
    " hog.",
)
@click.option("--centers", help="Centers to label with; default: those shipped with the model.")
@click.option("--state", "state_dir", help="Directory of collections/NAME.")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes a free one.  [default: 8000]",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Server processes, each with an engine.  [default: 1]",
)
@click.option(
    "--config",
    type=click.Path(),
    help="File of lines as --print-config writes them; the environment wins.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print every setting as it would be used, secrets masked, and end.",
)
def serve(config: str | None, print_config: bool, **options: object) -> None:
    """Serve a model over REST.

    Options but --config and --print-config are also environment variables: MLCD_MODEL, MLCD_PORT, …
    """
    if not print_config:
        allow_descriptors()
        ignore_hangups()
        end_while_it_starts(STOPS[0])
    # The engine's process imports its libraries while this one reads the settings.
    launched = None if print_config else launch_engine()
    pause_collector()
    from mlcd.service.settings import read_settings, setting_lines

    settings = read_settings(options, file=config)
    if launched is None:
        click.echo("\n".join(setting_lines(settings)))
        return
    from mlcd.service.serve.preparation import prepare_process

    prepare_process(settings)
    listener = listen(settings)
    try:
        check_exposure(settings.auth, listener.getsockname()[0])
        status = _serve(settings, options, config, listener, launched)
    finally:
        listener.close()
    sys.exit(status)


def _serve(
    settings: "Settings",
    options: dict[str, object],
    config: str | None,
    listener: socket.socket,
    launched: LaunchedEngine,
) -> int:
    address = describe_address(listener)

    def say(served: str) -> None:
        click.echo(f"serving {served} on {address}")

    if settings.processes > 1:
        from mlcd.service.serve.server import SettingsSources
        from mlcd.service.serve.supervisor import Supervisor

        launched.dismiss()  # each server process launches its own engine
        source = SettingsSources(options, config)
        keep_what_is_open()  # resumes the collector of this process; others have their own
        return asyncio.run(Supervisor(settings, source, listener, announce=say).run())
    from mlcd.service.serve.preparation import start_model

    model = start_model(settings, lambda line: click.echo(f"mlcd: {line}", err=True), launched)
    # Imported while the engine opens the model, because the application takes as long to import.
    from mlcd.service.serve.server import describe, serve_on

    serve_on(listener, settings, model, serving=lambda resources: say(describe(resources)))
    return 0


def describe_address(listener: socket.socket) -> str:
    """Returns the URL for a browser on this machine, which cannot open a wildcard address."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        loopback = "127.0.0.1" if host == "0.0.0.0" else "[::1]"  # noqa: S104
        return f"http://{loopback}:{port} and every address of this machine"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(settings: "Settings", *, any_port: bool = False) -> socket.socket:
    """Binds the port before the model is loaded, so that a port in use is reported immediately.

    any_port: whether to take one of the next ports, or any free port, if the port is in use.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Every connection inherits TCP_NODELAY. Without it, the body of a response waits up to
        # 40 ms for the acknowledgment of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        next_ports = range(settings.port + 1, min(settings.port + _NEXT_PORTS, _MAX_PORT) + 1)
        other_ports = (*next_ports, 0) if any_port else ()
        _bind_first_free(listener, settings.host, (settings.port, *other_ports))
        listener.listen(BACKLOG)  # from here on no other process can take the port
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Conflict(
                f"port {settings.port} is in use", remedy="give another with --port"
            ) from error
        raise ConfigInvalid(
            f"cannot listen on {settings.host}:{settings.port}",
            remedy="give another --host or --port",
        ) from error
    return listener


def _bind_first_free(listener: socket.socket, host: str, ports: Sequence[int]) -> None:
    """Binds the first free port. Raises OSError if the last port is not free either."""
    for port in ports[:-1]:
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    listener.bind((host, ports[-1]))


def check_exposure(auth: "Auth", address: str) -> None:
    """Raises ConfigInvalid for a server without keys that other machines can reach.

    address: numeric address that the socket is bound to.
    """
    is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if auth.keys_file is None and auth.mode != "open" and not is_local:
        raise ConfigInvalid(
            f"on {address} other machines could use the server without API keys",
            remedy="make one with `mlcd keys create` and set MLCD_AUTH__KEYS_FILE,"
            " or set MLCD_AUTH__MODE=open",
        )
