"""`mlcd backup` and `mlcd restore`: the state directory of a server."""

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

    OUT holds collections with their thumbnails, jobs, names and STATE/keys.json, and the SHA-256 of
    each file.
    """
    from mlcd.pipelines.backup import back_up

    made = back_up(state, out)
    _report(made, out, reporter)
    if made.left_out:
        part, reason = next(iter(made.left_out.items()))
        raise ArtifactInvalid(
            f"{out} lacks {len(made.left_out)} damaged part(s), first {part}", remedy=reason
        )


@click.command()
@click.argument("backup", type=LOCAL_PATH)
@click.argument("state", type=LOCAL_PATH)
@reporter_option
def restore(backup: Path, state: Path, reporter: Reporter) -> None:
    """Copy what `mlcd backup` made to STATE, a new or empty directory.

    Every byte is compared with the backup's list before anything is put into its place.
    """
    from mlcd.pipelines.backup import restore as run

    _report(run(backup, state), state, reporter)


def _report(made: "Backup", place: Path, reporter: Reporter) -> None:
    parts = [
        f"{len(made.items)} collections of {sum(made.items.values()):,} items",
        "the job queue" if made.queue else "no job queue",
        "keys" if made.keys else "no keys",
    ]
    line = f"{', '.join(parts)}; {made.files} files, {made.bytes:,} bytes: {place}"
    reporter.result({FINISHED: str(place), **asdict(made)}, line)
