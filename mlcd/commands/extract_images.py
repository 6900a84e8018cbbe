"""`mlcd extract`: writes the images that a selection keeps as a new set of images."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlcd.commands.common_options import ARTIFACT, LOCAL_PATH, reporter_option
from mlcd.progress import Reporter

if TYPE_CHECKING:
    from mlcd.pipelines.extract import Form


@click.command()
@click.argument("selection", type=ARTIFACT)
@click.argument("out", type=LOCAL_PATH)
@click.option(
    "--as",
    "form",
    type=click.Choice(["links", "tar", "parquet"]),
    required=True,
    help="links: hard links to the files, below OUT; tar: shards in the layout of webdataset.",
)
@click.option("--images", help="Location of the images.  [default: where they were embedded]")
@reporter_option
def extract(
    selection: Path, out: Path, form: "Form", images: str | None, reporter: Reporter
) -> None:
    """Write the images that SELECTION keeps to OUT.

    Every command that accepts IMAGES can read OUT. Classes and, in tar and parquet, captions are
    included. If the command is interrupted, run it again: it resumes.
    """
    from mlcd.artifacts.selection import Selection
    from mlcd.pipelines.extract import extract as run

    num = run(Selection.open(selection), out, form, reporter, images=images)
    reporter.result({"images": num, "path": str(out)}, f"{num} images: {out}")
