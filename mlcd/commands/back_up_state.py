"""`mlcd backup` and `mlcd restore`: back up and restore the state directory of a server."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlcd.commands.common_options import FINISHED, LOCAL_PATH, reporter_option
from mlcd.errors import ArtifactInvalid
from mlcd.progress import Reporter

if TYPE_CHECKING:
    from mlcd.pipelines.backup import Backup


@click.command()
@click.argument("state", type=LOCAL_PATH)
@click.argument("out", type=LOCAL_PATH)
@reporter_option
def backup(state: Path, out: Path, reporter: Reporter) -> None:
    """Copy the state directory of `mlcd serve` to the new directory OUT, while servers write to it.

    OUT contains the collections with their thumbnails, jobs, names, STATE/keys.json, and the
    SHA-256 of each file.
    """
    from mlcd.pipelines.backup import back_up

    backup = back_up(state, out)
    _report(backup, out, reporter)
    if backup.left_out:
        part, reason = next(iter(backup.left_out.items()))
        raise ArtifactInvalid(
            f"{out} lacks {len(backup.left_out)} damaged part(s), first {part}", remedy=reason
        )


@click.command()
@click.argument("backup", type=LOCAL_PATH)
@click.argument("state", type=LOCAL_PATH)
@reporter_option
def restore(backup: Path, state: Path, reporter: Reporter) -> None:
    """Copy a BACKUP made by `mlcd backup` to STATE, a new or empty directory.

    Every checksum is verified before any file is put in place.
    """
    from mlcd.pipelines.backup import restore as run

    _report(run(backup, state), state, reporter)


def _report(backup: "Backup", place: Path, reporter: Reporter) -> None:
    parts = [
        f"{len(backup.items)} collections of {sum(backup.items.values()):,} items",
        "the job queue" if backup.queue else "no job queue",
        "keys" if backup.keys else "no keys",
    ]
    line = f"{', '.join(parts)}; {backup.files} files, {backup.bytes:,} bytes: {place}"
    reporter.result({FINISHED: str(place), **asdict(backup)}, line)
