"""The public surface, written down: `python tests/public/snapshots.py` writes it anew after a
change that is meant.

A change of these files is one that users meet: the changelog says it.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

import mlcd

_PROSE = {"title", "summary", "description", "example", "examples", "tags"}
# What a document without them means as well.
_IMPLIED = (("default", None), ("required", False))
FOLDER = Path(__file__).parent


def python_names() -> str:
    """The names of `import mlcd`, with the signatures of functions, classes and public methods."""
    lines = []
    for name in sorted(mlcd.__all__):
        member = getattr(mlcd, name)
        lines.append(f"mlcd.{name}{_signature(member)}")
        if inspect.isclass(member) and member.__module__ == "mlcd.api":
            lines += [
                f"mlcd.{name}.{each}{_signature(getattr(member, each))}" for each in _public(member)
            ]
    return "\n".join(lines) + "\n"


def _public(owner: type) -> list[str]:
    return [name for name in sorted(vars(owner)) if not name.startswith("_")]


def _signature(member: object) -> str:
    if not callable(member):
        return ""
    signature = inspect.signature(member)
    # Types are written otherwise by other versions of Python and NumPy; names and defaults are what
    # calls rest on.
    bare = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def command_line() -> str:
    """A line for each argument and option of each command."""
    from mlcd.cli import cli

    assert {point.name for point in entry_points(group="mlcd.commands")} <= set(
        cli.list_commands(click.Context(cli))
    )
    return "\n".join(_lines("mlcd", cli)) + "\n"


def _lines(path: str, command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        names = (
            "|".join(parameter.opts)
            if isinstance(parameter, click.Option)
            else parameter.human_readable_name
        )
        kind = "flag" if getattr(parameter, "is_flag", False) else _kind(parameter.type)
        required = " required" if parameter.required else ""
        yield f"{path} {names} {kind}{required}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield f"{path} {name}"
            yield from _lines(f"{path} {name}", command.get_command(context, name))


def _kind(kind: click.ParamType) -> str:
    return "|".join(kind.choices) if isinstance(kind, click.Choice) else kind.name


def rest_document() -> str:
    """The OpenAPI document without its prose, a line for each parameter, body, response
    and schema.
    """
    from mlcd.service.http.app import create_app

    document = _without_prose(create_app(None).openapi())
    lines = [
        f"{name} {_compact(schema)}"
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    for path, operations in sorted(document["paths"].items()):
        for method, operation in sorted(operations.items()):
            route = f"{method.upper()} {path}"
            lines += [
                f"{route} {each['in']} {_compact(each)}" for each in operation.get("parameters", ())
            ]
            lines += (
                [f"{route} takes {_compact(operation['requestBody'])}"]
                if "requestBody" in operation
                else []
            )
            for status, answer in operation["responses"].items():
                named = {**answer, "headers": sorted(answer.get("headers", ()))}
                lines.append(f"{route} gives {status} {_compact(named)}")
    return "\n".join(lines) + "\n"


def _compact(node: Any) -> str:
    return json.dumps(node, sort_keys=True, separators=(",", ":"))


def _without_prose(node: Any, *, names: bool = False) -> Any:
    """names: the keys of this object are those of users, such as the fields of a schema."""
    if isinstance(node, list):
        return [_without_prose(each) for each in node]
    if isinstance(node, float) and node.is_integer():
        return int(node)  # 1 and 1.0 are one number in JSON
    if not isinstance(node, dict):
        return node
    return {
        key: _without_prose(value, names=not names and key in ("properties", "schemas", "paths"))
        for key, value in node.items()
        if names or (key not in _PROSE and (key, value) not in _IMPLIED)
    }


SNAPSHOTS: dict[str, Callable[[], str]] = {
    "python.txt": python_names,
    "command_line.txt": command_line,
    "openapi.txt": rest_document,
}

if __name__ == "__main__":
    for file, current in SNAPSHOTS.items():
        (FOLDER / file).write_text(current())
