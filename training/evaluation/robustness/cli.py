"""The command `mlcd evaluate robustness`."""

from pathlib import Path

import click

from mlcd.commands.common_options import LOCAL_PATH, announce, encoder_options, reporter_option
from mlcd.encoders.options import EncoderOptions
from mlcd.progress import Reporter


@click.command("robustness")
@click.argument("model")
@click.option(
    "--data",
    type=LOCAL_PATH,
    required=True,
    help="The folder of imagenet_v2, imagenet_a, imagenet_r, imagenet_sketch and objectnet.",
)
@click.option(
    "--seen",
    "may_be_seen",
    is_flag=True,
    help="Allow test images that the model's run has seen, and count them.",
)
@click.option("--out", type=LOCAL_PATH, help="Also write each result as an artifact.")
@encoder_options
@reporter_option
def evaluate_robustness(
    model: str,
    data: Path,
    *,
    may_be_seen: bool,
    out: Path | None,
    encoder: EncoderOptions,
    reporter: Reporter,
) -> None:
    """Classify the variants of ImageNet by texts, each among its own classes.

    MODEL is as for zero-shot. All variants that are in --data are evaluated.
    """
    from mlcd.training.evaluation.report import protocol_line, result_line
    from mlcd.training.evaluation.robustness.classify_variants import run_robustness

    robustness = run_robustness(
        data,
        model,
        out,
        may_be_seen=may_be_seen,
        options=encoder,
        announce=announce,
        reporter=reporter,
    )
    lines = [
        f"{name}: {result_line(record)}\n{protocol_line(record)}"
        for name, record in robustness.records.items()
    ]
    lines += [f"{name}: not evaluated: {reason}" for name, reason in robustness.reasons.items()]
    lines.append(f"missing: {', '.join(robustness.missing) or 'none'}")
    facts = {
        "results": robustness.records,
        "reasons": robustness.reasons,
        "missing": list(robustness.missing),
    }
    reporter.result(facts, "\n".join(lines))
