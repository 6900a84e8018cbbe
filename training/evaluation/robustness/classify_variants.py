"""Zero-shot classification of the present variants of ImageNet, each among its own classes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from mlcd.encoders.options import EncoderOptions
from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.progress import Reporter
from mlcd.training.evaluation.robustness.variants import VARIANTS, ClassMap, Variant, class_map
from mlcd.training.evaluation.stored_results import Record
from mlcd.training.evaluation.texts.evaluate import TextEvaluation, evaluate_classes
from mlcd.training.evaluation.texts.images_and_texts import TextImageModel, open_model
from mlcd.training.evaluation.texts.prompt_sets import Prompts, read_prompts
from mlcd.training.evaluation.texts.tested import LabeledTestImages, TestImages, open_test_images

_IMAGES: Final = "images"
_SEVEN: Final = "simple"  # the seven templates selected from CLIP's 80 for ImageNet


@dataclass(frozen=True)
class Robustness:
    """The results: by variant a record, or the reason why there is none, and missing variants."""

    records: dict[str, Record]
    reasons: dict[str, str]
    missing: tuple[str, ...]


def run_robustness(
    data: Path,
    spec: str,
    out: Path | None,
    *,
    may_be_seen: bool,
    options: EncoderOptions,
    announce: Callable[[str], None],
    reporter: Reporter,
) -> Robustness:
    """Evaluates a model on the variants in `data`; a damaged variant gets a reason, not a record.

    Raises NotFound if no variant is in `data`.
    """
    present = [variant for variant in VARIANTS if (data / variant.name).is_dir()]
    if not present:
        raise NotFound(
            f"{data} must contain one of {', '.join(variant.name for variant in VARIANTS)}",
            remedy="docs/how-to/evaluate-texts.md describes the layout of the files",
        )
    records: dict[str, Record] = {}
    reasons: dict[str, str] = {}
    with open_model(spec, options, announce) as model:
        for variant in present:
            out_of_variant = None if out is None else out / variant.name
            measure = partial(_measure, model, variant, data, out_of_variant, reporter)
            try:
                records[variant.name] = measure(may_be_seen=may_be_seen)
            except MlcdError as error:
                reasons[variant.name] = str(error)
    missing = tuple(variant.name for variant in VARIANTS if variant not in present)
    return Robustness(records, reasons, missing)


def _measure(
    model: TextImageModel,
    variant: Variant,
    data: Path,
    out: Path | None,
    reporter: Reporter,
    *,
    may_be_seen: bool,
) -> Record:
    folder = data / variant.name
    classes = class_map(variant, folder)
    images = folder / _IMAGES
    test_images = open_test_images(str(images if images.is_dir() else folder))
    chosen = choose_classes(test_images, classes, variant)
    return evaluate_classes(
        model,
        TextEvaluation(test_images, may_be_seen, out),
        chosen,
        [(classes.names[class_id],) for class_id in chosen.all_classes],
        _prompts(variant),
        {"names": f"of {variant.title}", "map_sha256": classes.sha256},
        reporter,
    )


def _prompts(variant: Variant) -> Prompts:
    if variant.templates is None:
        return read_prompts(_SEVEN)
    return Prompts("the bare name", variant.templates)


def choose_classes(
    test_images: TestImages, classes: ClassMap, variant: Variant
) -> LabeledTestImages:
    """Returns the images of a variant's classes, with only these classes for the classifier.

    Raises InvalidInput for a folder that is not a class, for a missing class, and for another
    number of images than published.
    """
    folders = [
        None if name is None else name.rpartition("/")[2] for name in test_images.class_names
    ]
    unknown = next(
        (folder for folder in folders if folder and folder not in classes.class_of), None
    )
    if unknown is not None and not classes.partial:
        raise InvalidInput(
            f"the folder {unknown} is not a class of {variant.title}",
            remedy="use the folders of the published data set",
        )
    class_ids = [classes.class_of.get(folder or "") for folder in folders]
    if missing := sorted(set(classes.names) - set(class_ids)):
        raise InvalidInput(
            f"{variant.title} must have images of all {len(classes.names)} classes, {len(missing)}"
            f" have none, such as {missing[0]}",
            remedy="restore them",
        )
    indices = np.flatnonzero([folder is not None for folder in class_ids])
    if len(indices) != variant.images:
        raise InvalidInput(
            f"{variant.title} must have {variant.images} images, got {len(indices)}",
            remedy="restore the published data set",
        )
    return LabeledTestImages(
        indices, [class_id for class_id in class_ids if class_id is not None], list(classes.names)
    )
