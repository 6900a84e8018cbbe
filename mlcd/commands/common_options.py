"""The options and the last lines that several commands share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlcd.encoders.encoder import EngineName, Precision
from mlcd.encoders.options import EncoderOptions
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import DecodeMode
from mlcd.locations import local_path
from mlcd.progress import Reporter

FINISHED = "finished"


class LocalPath(click.Path):
    """A path on this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            local_path(value)
        return super().convert(value, param, ctx)


LOCAL_PATH = LocalPath(path_type=Path)


def reporter_option(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--json` and passes a Reporter."""

    @click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Progress and result as JSON lines on standard output.",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool, **kwargs: Any) -> None:
        command(*args, reporter=Reporter("json" if as_json else "auto"), **kwargs)

    return wrapped


def encoder_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for opening a model, and passes them as `encoder`."""

    @click.option(
        "--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True
    )
    @click.option(
        "--engine",
        type=click.Choice(["auto", "openvino", "torch"]),
        default="auto",
        show_default=True,
    )
    @click.option(
        "--exif",
        type=click.Choice(["apply", "ignore"]),
        help="Other than the model's preprocessing says.",
    )
    @click.option(
        "--decode",
        type=click.Choice(["exact", "fast"]),
        help="fast: JPEG at a fraction of its size.",
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        precision: Precision,
        engine: EngineName,
        exif: ExifPolicy | None,
        decode: DecodeMode | None,
        **kwargs: Any,
    ) -> None:
        options = EncoderOptions(precision=precision, engine=engine, exif=exif, decode=decode)
        command(*args, encoder=options, **kwargs)

    return wrapped


def announce(line: str) -> None:
    """Prints a line for people on standard error."""
    click.echo(f"mlcd: {line}", err=True)


def finish(reporter: Reporter, artifact: Any, line: str) -> None:
    """Reports the artifact that a command has made."""
    facts = {FINISHED: str(artifact.path), "digest": artifact.digest, **artifact.summary}
    reporter.result(facts, f"{line}: {artifact.path}")
