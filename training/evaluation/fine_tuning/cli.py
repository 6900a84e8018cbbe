"""The command `mlcd evaluate fine-tune`."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from mlcd.commands.common_options import (
    FINISHED,
    LOCAL_PATH,
    announce,
    encoder_options,
    reporter_option,
    unmatched_option,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.progress import Reporter

if TYPE_CHECKING:
    from mlcd.training.evaluation.scores import Metric

_METRICS = ("accuracy", "mean-per-class", "mean-top1-top5", "roc-auc")


@click.command("fine-tune")
@click.argument("model")
@click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
@click.option("--images", required=True, help="The data set, with a class for each image.")
@click.option("--out", type=LOCAL_PATH, required=True, help="Features, the run and the results.")
@click.option(
    "--hold-out",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of each class to test on.  [default: 0.2, or the split of the folders]",
)
@click.option("--split", type=LOCAL_PATH, help="A .json of the keys of train, val and test.")
@click.option("--metric", type=click.Choice(_METRICS), default="accuracy", show_default=True)
@click.option(
    "--seen",
    "may_be_seen",
    is_flag=True,
    help="Allow test images that the tower has seen, and count them.",
)
@unmatched_option
@encoder_options
@reporter_option
def evaluate_fine_tune(
    model: str,
    overrides: tuple[str, ...],
    images: str,
    out: Path,
    hold_out: float | None,
    split: Path | None,
    metric: str,
    *,
    may_be_seen: bool,
    allow_unmatched: bool,
    encoder: EncoderOptions,
    reporter: Reporter,
) -> None:
    """Fine-tune a whole tower on a data set, and compare it with the linear probe.

    MODEL is a value of model.start in a recipe. a.b=c sets a key of the recipe finetune, such as
    schedule.steps=500. Both are trained and tested on the same images; `mlcd evaluate compare
    OUT/linear-probe OUT/fine-tune` compares them image by image. After an interruption, run the
    same command again to resume.
    """
    from mlcd.training.evaluation.fine_tuning.fine_tune import FineTuning, fine_tune
    from mlcd.training.evaluation.report import protocol_line, result_line
    from mlcd.training.evaluation.splits import read_split

    if split is not None and hold_out is not None:
        raise click.UsageError("--split already sets what is held out: leave out --hold-out")
    parts = None if split is None else read_split(split)
    request = FineTuning(
        images, parts, hold_out, cast("Metric", metric), overrides, may_be_seen, allow_unmatched
    )
    records = fine_tune(model, request, out, options=encoder, announce=announce, reporter=reporter)
    lines = [f"{result_line(record)}\n{protocol_line(record)}" for record in records]
    reporter.result({FINISHED: str(out), "results": records}, "\n".join(lines))
