"""The commands `mlcd evaluate zero-shot`, `retrieval` and `compare`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlcd.commands.common_options import (
    ARTIFACT,
    ARTIFACT_OUT,
    LOCAL_PATH,
    announce,
    encoder_options,
    reporter_option,
    unmatched_option,
)
from mlcd.encoders.options import EncoderOptions
from mlcd.progress import Reporter

_Command = Callable[..., None]

_test = click.option(
    "--test", required=True, help="The images to test on, or their embeddings by the same model."
)


def _common_options(command: _Command) -> _Command:
    """Adds the options that zero-shot and retrieval share."""
    decorators: list[Callable[[_Command], _Command]] = [
        click.option(
            "--seen",
            "may_be_seen",
            is_flag=True,
            help="Allow test images that the model's run has seen, and count them.",
        ),
        click.option("--out", type=ARTIFACT_OUT, help="Also write the results as an artifact."),
        encoder_options,
        reporter_option,
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.command("zero-shot")
@click.argument("model")
@_test
@click.option(
    "--prompts",
    default="simple",
    show_default=True,
    help="simple, clip, a data set of CLIP such as food101, or a file of templates with {} for the "
    "name.",
)
@click.option(
    "--names",
    help="A .json or .csv of folders to names, or a data set of CLIP; default: the folders' names.",
)
@_common_options
def evaluate_zero_shot(
    model: str,
    test: str,
    prompts: str,
    names: str | None,
    *,
    may_be_seen: bool,
    out: Path | None,
    encoder: EncoderOptions,
    reporter: Reporter,
) -> None:
    """Classify images zero-shot, with each class as the mean of its prompts' embeddings, like CLIP.

    MODEL embeds images and texts: a model artifact, other weights that `mlcd export` accepts, or
    starter. Prints top-1, top-5 and mean per class, with 95 % intervals over images.
    """
    from mlcd.training.evaluation.texts import evaluate
    from mlcd.training.evaluation.texts.class_names import read_names
    from mlcd.training.evaluation.texts.images_and_texts import open_model
    from mlcd.training.evaluation.texts.prompt_sets import read_prompts
    from mlcd.training.evaluation.texts.tested import open_test_images

    templates, table = read_prompts(prompts), None if names is None else read_names(names)
    request = evaluate.TextEvaluation(open_test_images(test), may_be_seen, out)
    with open_model(model, encoder, announce) as opened:
        record = evaluate.evaluate_zero_shot(opened, request, templates, table, reporter)
    _report(record, reporter)


@click.command("retrieval")
@click.argument("model")
@_test
@click.option(
    "--captions",
    type=LOCAL_PATH,
    help="A .jsonl or .csv of paths and captions, or Karpathy's dataset_*.json; default: captions "
    "beside the images.",
)
@click.option(
    "--captions-per-image",
    type=click.IntRange(1),
    help="Use only the first captions of an image, up to this number.  [default: all]",
)
@unmatched_option
@_common_options
def evaluate_retrieval(
    model: str,
    test: str,
    captions: Path | None,
    captions_per_image: int | None,
    *,
    allow_unmatched: bool,
    may_be_seen: bool,
    out: Path | None,
    encoder: EncoderOptions,
    reporter: Reporter,
) -> None:
    """Retrieve images by captions and captions by images: R@1, R@5 and R@10 in both directions.

    An image is right if any of its captions is among the first K. Images without a caption are left
    out. MODEL is as for zero-shot. Prints each metric with its 95 % interval over images.
    """
    from mlcd.training.evaluation.texts import evaluate
    from mlcd.training.evaluation.texts.images_and_texts import open_model
    from mlcd.training.evaluation.texts.tested import open_test_images
    from mlcd.training.evaluation.texts.tested_captions import captions_of

    request = evaluate.TextEvaluation(open_test_images(test), may_be_seen, out)
    texts = captions_of(
        request.test_images,
        captions,
        max_captions=captions_per_image,
        may_be_unmatched=allow_unmatched,
    )
    with open_model(model, encoder, announce) as opened:
        record = evaluate.evaluate_retrieval(opened, request, texts, reporter)
    _report(record, reporter)


@click.command("compare")
@click.argument("first", type=ARTIFACT)
@click.argument("second", type=ARTIFACT)
@reporter_option
def compare_evaluations(first: Path, second: Path, reporter: Reporter) -> None:
    """Compare two evaluations of the same images, FIRST and SECOND, written with --out.

    Prints the difference of their shares of right images, its 95 % interval, and the p-value of
    McNemar's exact test.
    """
    from mlcd.training.evaluation.compare import compare
    from mlcd.training.evaluation.stored_results import read_stored_results

    comparison = compare(read_stored_results(first), read_stored_results(second))
    reporter.result(comparison.facts(), str(comparison))


def _report(record: dict[str, Any], reporter: Reporter) -> None:
    from mlcd.training.evaluation.report import protocol_line, result_line

    reporter.result({"results": [record]}, f"{result_line(record)}\n{protocol_line(record)}")
