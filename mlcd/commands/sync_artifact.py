"""`mlcd sync`: an artifact in another place."""

from dataclasses import asdict

import click

from mlcd.commands.common_options import FINISHED, reporter_option
from mlcd.progress import Reporter


@click.command()
@click.argument("source")
@click.argument("target")
@reporter_option
def sync(source: str, target: str, reporter: Reporter) -> None:
    """Copy the artifact at SOURCE to TARGET, and compare every byte there with its manifest.

    Each is a directory or a URL such as s3://bucket/labels (extras s3, gcs, azure, hf;
    credentials by the environment). Interrupted, the same command goes on.
    """
    from mlcd.pipelines.sync import sync as run

    synced = run(source, target, reporter)
    line = f"{synced.kind} of {synced.files} files, {synced.copied} copied: {target}"
    reporter.result({FINISHED: target, **asdict(synced)}, line)
