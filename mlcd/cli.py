"""The `mlcd` command: finds and runs a command, and prints its errors."""

import ast
import os
import sys
import traceback
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any, Final

import click

from mlcd.errors import MlcdError
from mlcd.extras import install_command_for, missing_package
from mlcd.locations import show_location
from mlcd.too_many_files import is_too_many_files, too_many_files
from mlcd.version import __version__

# module of each of our commands; imported only when the command is called
_COMMANDS: Final = {
    "backup": "back_up_state",
    "cluster": "cluster_embeddings",
    "clusters": "change_clusters",
    "curate": "curate_images",
    "demo": "run_demo",
    "doctor": "check_machine",
    "embed": "embed_images",
    "export": "export_model",
    "extract": "extract_images",
    "import": "import_vectors",
    "index": "index_embeddings",
    "label": "label_images",
    "name": "name_clusters",
    "quantize": "quantize_model",
    "restore": "back_up_state",
    "sync": "sync_artifact",
    "verify": "verify_artifact",
}
# extra of each product, to prefer if several extras install the missing package
_EXTRAS: Final = {"mlcd.service": "serve", "mlcd.training": "train", "mlcd.demo": "train"}
_USER_ERROR = 2
_INTERRUPTED = 130


class _Commands(click.Group):
    """Our commands, and commands that installed products add through the entry point
    `mlcd.commands`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            {*super().list_commands(ctx), *_COMMANDS, *(point.name for point in _find_plugins())}
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them, which would take most of a second."""
        names = self.list_commands(ctx)
        width = formatter.width - 6 - max(map(len, names))
        commands = [click.Command(name, help=_read_docstring(name)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(command.name or "", command.get_short_help_str(width)) for command in commands]
            )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            module, function = _locate(cmd_name)
            own: click.Command = getattr(import_module(module), function)
            return own
        for point in _find_plugins():
            if point.name == cmd_name:
                try:
                    command: click.Command = point.load()
                except ModuleNotFoundError as error:
                    if _is_own(error):
                        raise
                    return _make_failing_command(cmd_name, _describe_missing(error), ctx)
                return command
        return None


def _make_failing_command(name: str, missing: str, ctx: click.Context) -> click.Command:
    """Returns a command that is listed, and whose call fails with the missing package."""

    def refuse() -> None:
        raise click.UsageError(f"`mlcd {name}` needs {missing}", ctx)

    return click.Command(
        name,
        callback=refuse,
        short_help="Not installed.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _locate(name: str) -> tuple[str, str]:
    """Returns the module and the function of one of our commands."""
    return f"mlcd.commands.{_COMMANDS[name]}", f"{name}_" if iskeyword(name) else name


def _read_docstring(name: str) -> str:
    """Reads a command's docstring from its source; "" if the source is missing."""
    if name in _COMMANDS:
        module, function = _locate(name)
    else:
        (point,) = (point for point in _find_plugins() if point.name == name)
        module, function = point.module, point.attr
    try:
        spec = find_spec(module)
        source = Path(spec.origin).read_bytes() if spec and spec.origin else b""
        nodes = ast.walk(ast.parse(source))
    except (ImportError, OSError, SyntaxError):
        return ""
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.get_docstring(node) or ""
    return ""


def _find_plugins() -> Any:
    return entry_points(group="mlcd.commands")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlcd")
def cli() -> None:
    """Raw images to embeddings, clusters, labels, a trained ViT and a live service."""


def main() -> None:
    """Runs the command and exits: 0 on success, 2 after a one-line error that the user can fix, 130
    if interrupted.
    """
    try:
        _run()
    except Exception as error:
        # any import or library may raise it, as all of them open files
        if not is_too_many_files(error):
            raise
        _fail(str(too_many_files()))


def _run() -> None:
    try:
        cli(prog_name="mlcd", standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "mlcd"
        _fail(f"{_usage_message(error)} (`{where} --help` explains)")
    except click.ClickException as error:
        _fail(error.format_message())
    except MlcdError as error:
        _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("mlcd: interrupted; run the same command again to resume", err=True)
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as error:
        if _is_own(error):
            raise
        _fail(f"this needs {_describe_missing(error)}")
    except BrokenPipeError:  # `mlcd … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _usage_message(error: click.UsageError) -> str:
    """Returns Click's message; for a missing `--model`, suggests a model."""
    if isinstance(error, click.MissingParameter) and error.param and error.param.name == "model":
        return "--model is required: give --model starter, or a model of your own"
    return error.format_message()


def _is_own(error: ModuleNotFoundError) -> bool:
    return error.name is None or error.name.partition(".")[0] == "mlcd"


def _describe_missing(error: ImportError) -> str:
    modules = [
        ".".join(frame.f_globals.get("__name__", "").split(".")[:2])
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    likely_extra = next(
        (extra for product, extra in _EXTRAS.items() if product in modules), "serve"
    )
    package = missing_package(error)
    return f"the package {package}: {install_command_for(package, likely=likely_extra)}"


def _fail(message: str) -> None:
    click.echo(f"mlcd: {' '.join(show_location(message).split())}", err=True)
    sys.exit(_USER_ERROR)
