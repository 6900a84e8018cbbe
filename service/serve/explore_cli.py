"""The command `mlcd explore`: shows a folder of photographs as a page in the browser."""

import asyncio
import os
import shutil
import sys
import threading
import webbrowser
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mlcd.child import STOPS
from mlcd.errors import MlcdError, NotFound
from mlcd.export.starter.artifact import STARTER
from mlcd.locations import is_url
from mlcd.progress import count_of
from mlcd.service.explore.place_state import AlreadyOpen, PlaceState, absolute, forget, list_states
from mlcd.service.explore.progress_board import ExplorationProgress
from mlcd.service.host.allocator import pause_collector
from mlcd.service.host.signals import end_while_it_starts
from mlcd.service.inference.engine.launched import launch_engine
from mlcd.service.timings import EXPLORE_LOOK_S

if TYPE_CHECKING:  # slow imports come after the engine's launch
    from mlcd.service.explore.exploration_thread import Exploration

_STAGES: Final = {
    "list": "looking for pictures",
    "embed": "looking at pictures",
    "cluster": "grouping",
    "name": "reading words for the names",
    "label": "sorting",
    "done": "done",
    "failed": "stopped",
}


class ExplorationFailed(MlcdError):
    """The exploration stopped with an error."""


@click.command()
@click.argument("photos", required=False)
@click.option(
    "--model",
    default=STARTER,
    show_default=True,
    help="As for `mlcd serve`; or embeddings of the pictures, made or imported.",
)
@click.option(
    "--clusters", type=click.IntRange(1), help="How many groups.  [default: chosen by the pictures]"
)
@click.option(
    "--state",
    "state_dir",
    type=click.Path(path_type=Path),
    help="Directory for the results.  [default: in the user's cache, by place and model]",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--no-browser", is_flag=True, help="Open no browser.")
@click.option("--once", is_flag=True, help="Process everything, then exit.")
@click.option("--list", "list_", is_flag=True, help="List what is stored, then exit.")
@click.option(
    "--forget", "forget_", is_flag=True, help="Remove what is stored for PHOTOS, then exit."
)
def explore(
    photos: str | None,
    model: str,
    clusters: int | None,
    state_dir: Path | None,
    port: int,
    host: str,
    no_browser: bool,
    once: bool,
    list_: bool,
    forget_: bool,
) -> None:
    """See PHOTOS grouped, named and searchable, in the browser.

    PHOTOS: a folder, a glob, tar shards, parquet, zip, or a URL of these. Ctrl-C stops; the next
    run resumes, with new, changed and deleted pictures.
    """
    if list_:
        _list_states()
        return
    if photos is None:
        raise click.UsageError("give the PHOTOS, as in `mlcd explore ~/Pictures`")
    if forget_:
        for path in forget(photos, state_dir):
            click.echo(f"removed {path}")
        return
    check_place(photos)
    end_while_it_starts(STOPS[0])
    # The engine's process imports its libraries while this one reads the settings.
    launched = launch_engine()
    if not once:
        click.echo("mlcd: starting", err=True)
    state = PlaceState.of(photos, model, state_dir)
    try:
        with state.lock() as lock:
            options: dict[str, object] = {
                "model": model,
                "state_dir": str(state.path),
                "host": host,
                "port": port,
                "explore": {"place": absolute(photos), "clusters": clusters},
                # the terminal shows the exploration, which reports its own errors
                "log": {"level": "error"},
                "drain_s": 0.0,  # no load balancer has to notice the end
            }
            if once:
                options |= {"port": 0, "host": "127.0.0.1"}
            _serve(options, launched, lock.write_url, browse=not (no_browser or once), once=once)
    except AlreadyOpen as error:
        launched.dismiss()
        if not error.url or once:
            raise
        click.echo(f"already open: {error.url}")
        if not no_browser:
            _open_browser(error.url)


def _serve(
    options: dict[str, object],
    launched: Any,
    write_url: Callable[[str], None],
    *,
    browse: bool,
    once: bool,
) -> None:
    pause_collector()
    from mlcd.service.serve.cli import check_exposure, listen
    from mlcd.service.serve.preparation import prepare_process, start_model
    from mlcd.service.settings import read_settings

    settings = read_settings(options)
    prepare_process(settings)
    listener = listen(settings, any_port=True)
    try:
        check_exposure(settings.auth, listener.getsockname()[0])
        # Imports the libraries meanwhile: the first run exports the model, which takes seconds.
        threading.Thread(
            target=import_module, args=("mlcd.service.serve.server",), daemon=True
        ).start()
        model = start_model(settings, lambda line: click.echo(f"mlcd: {line}", err=True), launched)
        from mlcd.service.serve.server import serve_on

        address, port = listener.getsockname()[:2]
        url = f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
        if not once and port != settings.port:
            click.echo(f"mlcd: port {settings.port} is in use", err=True)

        def serving(_: object) -> None:
            if once:
                return
            write_url(url)
            click.echo(f"{url}   (Ctrl-C ends it; the next run continues)")
            if browse:
                _open_browser(url)

        errors: list[str] = []

        def watch(exploration: "Exploration", finish: Callable[[], None]) -> "asyncio.Task[None]":
            return asyncio.create_task(_watch(exploration, finish, errors, url, once=once))

        serve_on(listener, settings, model, serving=serving, watch=watch)
    finally:
        listener.close()
    if errors:
        raise ExplorationFailed(errors[0])


async def _watch(
    exploration: "Exploration",
    finish: Callable[[], None],
    errors: list[str],
    url: str,
    *,
    once: bool,
) -> None:
    """Prints the progress on the terminal, and ends the server after the last step of `once` or
    after a failure without pictures.
    """
    try:
        await _print_progress(exploration, finish, errors, url, once=once)
    except asyncio.CancelledError:
        if exploration.board.now.stage not in ("done", "failed"):
            click.echo("mlcd: stopping; finished work stays, and the next run continues", err=True)
        raise


async def _print_progress(
    exploration: "Exploration",
    finish: Callable[[], None],
    errors: list[str],
    url: str,
    *,
    once: bool,
) -> None:
    shown, terminal = "", sys.stderr.isatty()
    stage, has_shown_commands = None, False
    while True:
        now = exploration.board.now
        line = describe(now)
        if terminal and line != shown:
            width = shutil.get_terminal_size().columns - 1
            click.echo(f"\r{line[:width]:<{width}}", nl=False, err=True)
        if now.stage != stage and now.stage in ("done", "failed"):
            if terminal:
                click.echo("\r", nl=False, err=True)
            if now.stage == "done":
                if not has_shown_commands:
                    click.echo("The same, step by step:")
                    for command in exploration.commands():
                        click.echo(f"  {command}")
                click.echo(line if once else f"{line}: {url}")
                has_shown_commands = True
            else:
                errors.append(now.error or "")
            if once or (errors and not now.pictures):
                finish()
                return
            if errors:
                click.echo(f"mlcd: {errors.pop()}", err=True)
        shown, stage = line, now.stage
        await asyncio.sleep(EXPLORE_LOOK_S)


def describe(now: ExplorationProgress) -> str:
    """Describes the progress in one line."""
    line = _STAGES[now.stage]
    if now.total:
        line += f": {now.done} of {now.total}"
        if now.seconds_left is not None and now.seconds_left >= 1:
            line += f", {now.seconds_left:.0f} s left"
    line += f"   {count_of(now.pictures, 'picture')}"
    if now.skipped:
        line += f", {count_of(now.skipped, 'file')} skipped"
    if now.clusters:
        line += f", {count_of(now.clusters, 'group')}"
    return line


def check_place(photos: str) -> None:
    """Raises NotFound for a missing path, before anything is written for it."""
    if is_url(photos) or any(character in photos for character in "*?["):
        return
    if not (path := Path(photos).expanduser()).exists():
        raise NotFound(f"{path} does not exist", remedy="give the folder of your pictures")


def _list_states() -> None:
    states = list_states()
    if not states:
        click.echo("nothing is kept yet: mlcd explore PHOTOS")
    for state, facts in states:
        click.echo(f"{facts.place}   by {facts.model}, {facts.clustered} grouped: {state.path}")


def _open_browser(url: str) -> None:
    """Opens a browser if this machine has a display, to avoid browsers that run in the terminal."""
    displays = ("DISPLAY", "WAYLAND_DISPLAY")
    if sys.platform != "linux" or any(map(os.environ.get, displays)):  # noqa: TID251 - no setting
        webbrowser.open(url)
