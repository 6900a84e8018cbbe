"""Options and result lines that several commands share."""

import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mlcd.collections.store_urls import is_store, split_collection
from mlcd.encoders.endpoint_forms import is_endpoint
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ConfigInvalid
from mlcd.fetching.url_options import UrlOptions
from mlcd.locations import artifact_path, is_url, local_path, show_location
from mlcd.pipelines.ray.session import RayOptions, check_address, require_ray
from mlcd.progress import Reporter

FINISHED = "finished"


class LocalPath(click.Path):
    """A path on this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            local_path(value)
        return super().convert(value, param, ctx)


class ArtifactPath(click.ParamType[Path]):
    """The path of an artifact; for a URL, the path of its copy on this machine."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        del param, ctx
        return artifact_path(value)


class WeightsSpec(click.ParamType[str]):
    """The name or path of weights; for an artifact at a URL, the path of its copy."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        del param, ctx
        if is_endpoint(value):
            raise ConfigInvalid(
                "this command reads weights, and an endpoint does not give any",
                remedy="give a model artifact or a directory of weights",
            )
        return str(artifact_path(value)) if is_url(value) else value


class StoreOr(click.ParamType[Path | str]):
    """The URL of a collection in a store, or a value of another type."""

    name = "path"

    def __init__(self, wrapped_type: click.ParamType[Any]) -> None:
        self._wrapped = wrapped_type

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        if isinstance(value, str) and is_store(value):
            split_collection(value)  # raises if the URL is malformed
            return value
        path: Path = self._wrapped.convert(value, param, ctx)
        return path


LOCAL_PATH = LocalPath(path_type=Path)
ARTIFACT = ArtifactPath()  # its copy is fetched before the command starts
WEIGHTS = WeightsSpec()  # as ARTIFACT
ARTIFACT_OUT = ArtifactPath()
STORE_OR_ARTIFACT = StoreOr(ARTIFACT)  # as ARTIFACT
STORE_OR_PATH = StoreOr(LOCAL_PATH)


def reporter_option(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--json` and passes a Reporter; fetches the ARTIFACT and WEIGHTS values."""

    @click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Progress and result as JSON lines on standard output.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> None:
        reporter = Reporter("json" if as_json else "auto")
        for parameter in click.get_current_context().command.params:
            if parameter.type in (ARTIFACT, WEIGHTS, STORE_OR_ARTIFACT):
                _fetch(kwargs[str(parameter.name)], reporter)
        command(*args, reporter=reporter, **kwargs)

    return wrapper


def _fetch(value: Path | str | tuple[Path, ...] | None, reporter: Reporter) -> None:
    from mlcd.artifacts.copies import bring

    for path in value if isinstance(value, tuple) else (value,):
        if path is not None and not is_store(str(path)):
            bring(Path(path), reporter)


def encoder_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for opening a model, and passes them as `encoder`."""
    options = [option for option in fields(EncoderOptions) if "choices" in option.metadata]

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        values = {option.name: kwargs.pop(option.name) for option in options}
        command(*args, encoder=EncoderOptions(**values), **kwargs)

    for option in reversed(options):  # click lists options in reverse order of addition
        add = click.option(
            f"--{option.name}",
            type=click.Choice(option.metadata["choices"]),
            default=option.default,
            show_default=option.default is not None,
            help=option.metadata.get("help"),
        )
        wrapper = add(wrapper)
    return wrapper


def url_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for fetching images, and passes them as `urls`."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        values = {option.name: kwargs.pop(f"url_{option.name}") for option in fields(UrlOptions)}
        command(*args, urls=UrlOptions(**values), **kwargs)

    for option in reversed(fields(UrlOptions)):  # as in encoder_options
        add = click.option(
            f"--url-{option.name}",
            type=float if isinstance(option.default, float) else str,
            default=option.default,
            show_default=bool(option.default),
            help=option.metadata["help"],
        )
        wrapper = add(wrapper)
    return wrapper


def ray_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--on`, `--cpus`, `--gpus` and `--memory` to a command that has `--workers`, and passes
    `on`: None for this machine.
    """

    @click.option(
        "--on",
        metavar="ray[://HOST:PORT]",
        help="Use workers on a Ray cluster: the cluster that Ray finds from here, or the cluster at"
        " an address. All nodes must be able to read and write the same locations.",
    )
    @click.option(
        "--cpus", type=click.FloatRange(0, min_open=True), help="CPUs of one worker on Ray."
    )
    @click.option(
        "--gpus", type=click.FloatRange(0), help="GPUs of one worker on Ray; 0.5 is half a GPU."
    )
    @click.option(
        "--memory",
        type=click.FloatRange(0, min_open=True),
        help="Memory of one worker on Ray, in GiB.  [default: in proportion to its CPUs]",
    )
    @functools.wraps(command)
    def wrapper(
        *args: Any,
        on: str | None,
        cpus: float | None,
        gpus: float | None,
        memory: float | None,
        **kwargs: Any,
    ) -> None:
        if on is None and (cpus, gpus, memory) != (None, None, None):
            raise click.UsageError("--cpus, --gpus and --memory need --on ray")
        ray = None
        if on is not None:
            require_ray()
            workers, address = kwargs["workers"], check_address(on)
            ray = RayOptions(
                address=address,
                workers=workers,
                cpus=cpus or 1,
                gpus=gpus or 0,
                memory_gib=memory,
            )
        command(*args, on=ray, **kwargs)

    return wrapper


def ray_options_with_workers(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `ray_options`, and `--workers`, which requires `--on`."""

    @click.option(
        "--workers",
        type=click.IntRange(1),
        help="Number of workers on Ray.  [default: as many as fit]",
    )
    @ray_options
    @functools.wraps(command)
    def wrapper(*args: Any, workers: int | None, on: RayOptions | None, **kwargs: Any) -> None:
        if on is None and workers is not None:
            raise click.UsageError("--workers needs --on ray: a single process uses every core")
        command(*args, on=on, **kwargs)

    return wrapper


unmatched_option = click.option(
    "--allow-unmatched",
    is_flag=True,
    help="Skip rows of tables that match no image, instead of failing.",
)


def announce(line: str) -> None:
    """Prints a message to standard error."""
    click.echo(f"mlcd: {line}", err=True)


def finish(reporter: Reporter, artifact: Any, line: str) -> None:
    """Reports the artifact that a command wrote."""
    place = show_location(str(artifact.path))
    facts = {FINISHED: place, "digest": artifact.digest, **artifact.summary}
    reporter.result(facts, f"{line}: {place}")
