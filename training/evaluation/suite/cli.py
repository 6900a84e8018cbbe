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
    "--data", type=LOCAL_PATH, required=True, help="The folder of data sets, one folder each."
)
@click.option(
    "--model",
    "models",
    required=True,
    multiple=True,
    help="As for `mlcd embed`; may be given again.",
)
@click.option("--out", type=LOCAL_PATH, required=True, help="Features, results and the report.")
@click.option("--set", "names", multiple=True, help="Only this data set; may be given again.")
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
    """Evaluate models on all data sets that are there, as CLIP's 26, into one report.

    Features are computed once. The linear probe has each data set's own metric and split; a model
    of images and texts is measured zero-shot, too. The same command goes on after an interruption.
    """
    from mlcd.training.evaluation.suite.run_suite import run_suites
    from mlcd.training.evaluation.suite.suite_report import facts, page, write_page

    suites = run_suites(
        data, models, out, names=names, options=encoder, announce=announce, reporter=reporter
    )
    write_page(suites, out)
    reporter.result({FINISHED: str(out), **facts(suites)}, page(suites))
