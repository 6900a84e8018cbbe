"""The command `mlcd keys`."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click
import orjson

from mlcd.collections.item import check_name
from mlcd.errors import InvalidInput
from mlcd.service.keys.file import SCOPES, Key, create_key, read_keys, revoke_key
from mlcd.service.settings import read_keys_file

_ID: Final = re.compile(r"[0-9a-f]{8}")
_COLUMNS: Final = ("id", "state", "name", "scopes", "collections", "rate", "created", "expires")

_file_option = click.option("--file", help="The keys file.  [default: MLCD_AUTH__KEYS_FILE]")


@click.group()
def keys() -> None:
    """Create, list and revoke API keys of `mlcd serve`.

    A running server applies changes within two seconds.
    """


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    default=("embed", "search"),
    show_default=True,
)
@click.option("--rate", type=click.IntRange(min=1), help="Images a minute.  [default: no limit]")
@click.option(
    "--collection",
    "collections",
    metavar="NAMES",
    help="The only collections that the key sees, comma-separated; it then sees only its own jobs."
    "  [default: everything]",
)
@click.option(
    "--days",
    type=click.IntRange(1, 36500),
    help="Days that the key is valid.  [default: until it is revoked]",
)
@_file_option
def create(
    name: str,
    scopes: tuple[Any, ...],
    rate: int | None,
    collections: str | None,
    days: int | None,
    file: str | None,
) -> None:
    """Create a key for NAME, a person or a program, and print it. It cannot be shown again."""
    if not name.strip() or not name.isprintable() or len(name) > Key.MAX_NAME:
        raise InvalidInput(f"the name must be one line of 1 to {Key.MAX_NAME} printable characters")
    names = None if collections is None else [*map(check_name, collections.split(","))]
    if names is not None and "admin" in scopes:
        raise InvalidInput(
            "a key with the scope admin sees every collection", remedy="leave out --collection"
        )
    now = datetime.now(UTC).replace(microsecond=0)
    expires = None if days is None else now + timedelta(days=days)
    key, token = create_key(
        Path(read_keys_file(file)),
        name,
        scopes=scopes,
        now=now,
        rate=rate,
        collections=names,
        expires=expires,
    )
    click.echo(
        f"mlcd: key {key.id} for {key.name}: {', '.join(key.scopes)};"
        " it is not stored, so copy it now",
        err=True,
    )
    click.echo(token)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
@_file_option
def list_keys(as_json: bool, file: str | None) -> None:
    """List the id and state of every key, oldest first; never the key itself."""
    now = datetime.now(UTC)
    rows = [_describe_key(key, now) for key in read_keys(Path(read_keys_file(file))).keys]
    if as_json:
        click.echo(orjson.dumps(rows))
        return
    table = [_COLUMNS, *(tuple(_format_cell(row[column]) for column in _COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        )


@keys.command()
@click.argument("key_id", metavar="ID")
@_file_option
def revoke(key_id: str, file: str | None) -> None:
    """Revoke the key with this ID, shown by `mlcd keys list`."""
    if not _ID.fullmatch(key_id):
        # The argument may be the key itself, which must not be repeated.
        raise InvalidInput(
            "the id must be 8 letters and digits", remedy="`mlcd keys list` shows the ids"
        )
    key = revoke_key(
        Path(read_keys_file(file)), key_id, now=datetime.now(UTC).replace(microsecond=0)
    )
    click.echo(f"key {key.id} for {key.name} is revoked")


def _describe_key(key: Key, now: datetime) -> dict[str, Any]:
    return {"state": key.state(now), **key.model_dump(mode="json", exclude={"sha256"})}


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(value) if isinstance(value, list) else str(value)
