"""`mlcd name`: names for centers."""

from dataclasses import asdict
from pathlib import Path

import click

from mlcd.commands.common_options import FINISHED, reporter_option
from mlcd.progress import Reporter


@click.command()
@click.argument("centers", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help='JSON like {"3": "cat"}, or lines of id<TAB>name or id,name; null or nothing takes a name'
    " away.",
)
@reporter_option
def name(centers: Path, file: Path, reporter: Reporter) -> None:
    """Name CENTERS by hand.

    Names stand beside the centers and change nothing else: digests, labels and indexes stay valid.
    """
    from mlcd.pipelines.name import set_names

    naming = set_names(centers, file)
    facts = {FINISHED: str(centers), **asdict(naming)}
    line = (
        f"{naming.num_changed} names changed, "
        f"{naming.num_named} of {naming.num_centers} centers named: {centers}"
    )
    reporter.result(facts, line)
