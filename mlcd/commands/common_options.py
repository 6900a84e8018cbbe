"""The options and the last lines that several commands share."""

import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mlcd.encoders.options import EncoderOptions
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
    options = [each for each in fields(EncoderOptions) if "choices" in each.metadata]

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        chosen = {each.name: kwargs.pop(each.name) for each in options}
        command(*args, encoder=EncoderOptions(**chosen), **kwargs)

    for each in reversed(options):  # click lists first the one that is added last
        add = click.option(
            f"--{each.name}",
            type=click.Choice(each.metadata["choices"]),
            default=each.default,
            show_default=each.default is not None,
            help=each.metadata.get("help"),
        )
        wrapped = add(wrapped)
    return wrapped


def announce(line: str) -> None:
    """Prints a line for people on standard error."""
    click.echo(f"mlcd: {line}", err=True)


def finish(reporter: Reporter, artifact: Any, line: str) -> None:
    """Reports the artifact that a command has made."""
    facts = {FINISHED: str(artifact.path), "digest": artifact.digest, **artifact.summary}
    reporter.result(facts, f"{line}: {artifact.path}")
