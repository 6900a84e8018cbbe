"""The command `mlcd evaluate suite`."""

from pathlib import Path

import click

from mlcd.commands.common_options import (
    FINISHED,
    LOCAL_PATH,
    announce,
    encoder_options,
    reporter_option,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.progress import Reporter


@click.command("suite")
@click.option(
    "--data",
    type=LOCAL_PATH,
    required=True,
    help="The folder of data sets, with one folder for each.",
)
@click.option(
    "--model",
    "models",
    required=True,
    multiple=True,
    help="A model as for `mlcd embed`; repeatable.",
)
@click.option("--out", type=LOCAL_PATH, required=True, help="Features, results and the report.")
@click.option("--set", "names", multiple=True, help="Evaluate only this data set; repeatable.")
@encoder_options
@reporter_option
def evaluate_suite(
    data: Path,
    models: tuple[str, ...],
    out: Path,
    names: tuple[str, ...],
    encoder: EncoderOptions,
    reporter: Reporter,
) -> None:
    """Evaluate models on all data sets in a folder, such as CLIP's 26, and write one report.

    Features are computed once. The linear probe uses each data set's own metric and split; a model
    with a text tower is also evaluated zero-shot. After an interruption, run the same command again
    to resume.
    """
    from mlcd.training.evaluation.suite.run_suite import run_suites
    from mlcd.training.evaluation.suite.suite_report import facts, page, write_page

    suites = run_suites(
        data, models, out, names=names, options=encoder, announce=announce, reporter=reporter
    )
    write_page(suites, out)
    reporter.result({FINISHED: str(out), **facts(suites)}, page(suites))
