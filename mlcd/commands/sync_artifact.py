"""`mlcd sync`: copies an artifact to another location."""

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

    Each is a directory or a URL such as s3://bucket/labels (extras s3, gcs, azure, hf; credentials
    from the environment). If the command is interrupted, run it again: it resumes.
    """
    from mlcd.pipelines.sync import sync as run

    result = run(source, target, reporter)
    line = f"{result.kind} of {result.files} files, {result.copied} copied: {target}"
    reporter.result({FINISHED: target, **asdict(result)}, line)
