"""The `mlcd` command, which parses, opens, calls one pipeline and prints."""

import os
import sys
from importlib.metadata import entry_points
from typing import Any

import click

from mlcd.commands.change_clusters import clusters
from mlcd.commands.check_machine import doctor
from mlcd.commands.cluster_embeddings import cluster
from mlcd.commands.curate_images import curate
from mlcd.commands.embed_images import embed
from mlcd.commands.export_model import export
from mlcd.commands.index_embeddings import index
from mlcd.commands.label_images import label
from mlcd.commands.name_clusters import name
from mlcd.commands.run_demo import demo
from mlcd.commands.sync_artifact import sync
from mlcd.commands.verify_artifact import verify
from mlcd.errors import MlcdError
from mlcd.version import __version__

_BAD_USAGE = 2
_INTERRUPTED = 130


class _Commands(click.Group):
    """The group of our commands and of those that installed products add through the entry point
    `mlcd.commands`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(point.name for point in _added())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        for point in _added():
            if point.name == cmd_name:
                try:
                    command: click.Command = point.load()
                except ImportError as error:
                    raise click.UsageError(
                        f"`mlcd {cmd_name}` needs the package {error.name}: pip install"
                        " 'mlcd[serve,train]'"
                    ) from error
                return command
        return None


def _added() -> Any:
    return entry_points(group="mlcd.commands")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlcd")
def cli() -> None:
    """Raw images to embeddings, clusters, labels, a trained ViT and a live service."""


for _command in (
    cluster,
    clusters,
    curate,
    demo,
    doctor,
    embed,
    export,
    index,
    label,
    name,
    sync,
    verify,
):
    cli.add_command(_command)


def main() -> None:
    """Runs the command and exits: 0 on success, 2 with one line for a user's mistake, 130 when
    interrupted.
    """
    try:
        cli(prog_name="mlcd", standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "mlcd"
        _fail(f"{error.format_message()} (`{where} --help` explains)")
    except click.ClickException as error:
        _fail(error.format_message())
    except MlcdError as error:
        _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("mlcd: interrupted; run the same command again to go on", err=True)
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("mlcd", "training", "service"):
            raise
        _fail(f"this needs the package {error.name}: pip install 'mlcd[serve,train]'")
    except BrokenPipeError:  # `mlcd … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(message: str) -> None:
    click.echo(f"mlcd: {' '.join(message.split())}", err=True)
    sys.exit(_BAD_USAGE)
