"""Runs zero-shot classification or retrieval, and returns the record of metrics and protocol."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlcd.artifacts.manifest import Request
from mlcd.errors import InvalidInput
from mlcd.progress import Reporter
from mlcd.training.evaluation.seen import check_seen, find_seen
from mlcd.training.evaluation.splits import check_several_classes, split_digest
from mlcd.training.evaluation.stored_results import Record, StoredOutcome, find_or_create
from mlcd.training.evaluation.texts.class_names import NameTable, names_of
from mlcd.training.evaluation.texts.images_and_texts import ImageRows, TextImageModel
from mlcd.training.evaluation.texts.prompt_sets import Prompts
from mlcd.training.evaluation.texts.retrieval import retrieval_figures, retrieval_ranks
from mlcd.training.evaluation.texts.tested import LabeledTestImages, TestImages, choose_classes
from mlcd.training.evaluation.texts.tested_captions import TestedCaptions
from mlcd.training.evaluation.texts.zero_shot import (
    Figures,
    class_prompts,
    classifier,
    ranks,
    zero_shot_figures,
)
from mlcd.types import SampleKey


@dataclass(frozen=True)
class TextEvaluation:
    """The test images of a zero-shot classification or retrieval.

    may_be_seen: count test images that the model's run has seen, instead of raising. out: path of
    the artifact of the result; None stores none.
    """

    test_images: TestImages
    may_be_seen: bool = False
    out: Path | None = None


def evaluate_zero_shot(
    model: TextImageModel,
    request: TextEvaluation,
    prompts: Prompts,
    table: NameTable | None,
    reporter: Reporter,
) -> Record:
    """Returns the record of zero-shot classification.

    Raises InvalidInput for classes without names, and for images that the model's run has seen.
    """
    chosen = choose_classes(request.test_images)
    check_several_classes(chosen.all_classes)
    names = names_of(chosen.all_classes, table)
    facts = {"names": "of the folders" if table is None else "of a table"}
    return evaluate_classes(model, request, chosen, names, prompts, facts, reporter)


def evaluate_classes(
    model: TextImageModel,
    request: TextEvaluation,
    chosen: LabeledTestImages,
    names: Sequence[tuple[str, ...]],
    prompts: Prompts,
    facts: Mapping[str, Any],
    reporter: Reporter,
) -> Record:
    """Returns the record of zero-shot classification of these images among these classes.

    names: names of each class of `chosen.all_classes`. facts: protocol fields about the classes and
    their names. Raises InvalidInput for images that the model's run has seen.
    """
    settings = {
        "kind": "zero-shot",
        "prompts": prompts.name,
        "templates": len(prompts.templates),
        "prompts_sha256": prompts.sha256,
        **facts,
        "class_names": dict(zip(chosen.all_classes, map(list, names), strict=True)),
    }

    def make() -> tuple[Record, StoredOutcome]:
        images = request.test_images.rows(model, chosen.indices, reporter)
        texts, counts = class_prompts(names, prompts.templates)
        classes = classifier(model.text_rows(texts, reporter), counts)
        class_names = _class_names(request.test_images, chosen, images)
        class_ids = {name: class_id for class_id, name in enumerate(chosen.all_classes)}
        right = np.array([class_ids[name] for name in class_names])
        rank = ranks(images.rows, classes, right)
        record = _record(
            model,
            request,
            images,
            zero_shot_figures(rank, right, len(chosen.all_classes)),
            {
                **{name: value for name, value in settings.items() if name != "class_names"},
                "classes": len(chosen.all_classes),
                "split": split_digest(
                    images.keys, class_names, np.ones(len(images.keys), dtype=np.bool_)
                ),
            },
        )
        return record, StoredOutcome(images.keys, class_names, rank == 0, {"rank": rank})

    return find_or_create(request.out, lambda out: _request(model, request, settings, out), make)


def evaluate_retrieval(
    model: TextImageModel,
    request: TextEvaluation,
    tested_captions: TestedCaptions,
    reporter: Reporter,
) -> Record:
    """Returns the record of retrieval in both directions.

    Images without a caption are left out. Raises InvalidInput if no image has a caption, and for
    images that the model's run has seen.
    """
    captions = tested_captions.texts
    keys = request.test_images.keys
    chosen = np.flatnonzero([len(texts_of_image) > 0 for texts_of_image in captions])
    if not len(chosen):
        raise InvalidInput(
            f"no image of {request.test_images.location} has a caption",
            remedy="give --captions: a .jsonl or .csv with path and caption or captions",
        )
    settings = {
        "kind": "retrieval",
        "captions_sha256": captions_digest((keys[row], captions[row]) for row in chosen.tolist()),
    }

    def make() -> tuple[Record, StoredOutcome]:
        images = request.test_images.rows(model, chosen, reporter)
        caption_of = {keys[row]: captions[row] for row in chosen.tolist()}
        texts = [text for key in images.keys for text in caption_of[key]]
        counts = np.array([len(caption_of[key]) for key in images.keys])
        image_of = np.repeat(np.arange(len(images.keys)), counts)
        rank_of = retrieval_ranks(images.rows, model.text_rows(texts, reporter), image_of)
        protocol = {
            **settings,
            **tested_captions.facts(),
            "captions": len(texts),
            "captions_per_image": f"{counts.min()} to {counts.max()}",
            "split": captions_digest((key, caption_of[key]) for key in images.keys),
        }
        figures = retrieval_figures(rank_of, image_of)
        record = _record(model, request, images, figures, protocol)
        no_classes = [None] * len(images.keys)
        return record, StoredOutcome(
            images.keys,
            no_classes,
            rank_of.of_image == 0,
            {"rank": rank_of.of_image, "captions": counts},
        )

    return find_or_create(request.out, lambda out: _request(model, request, settings, out), make)


def captions_digest(captions: Iterable[tuple[SampleKey, Sequence[str]]]) -> str:
    """Returns the SHA-256 over images and their captions; results with the same digest compare."""
    rows = sorted((key, *texts) for key, texts in captions)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _class_names(
    test_images: TestImages, chosen: LabeledTestImages, images: ImageRows
) -> list[str]:
    pairs = zip(chosen.indices.tolist(), chosen.class_names, strict=True)
    name_of = {test_images.keys[index]: name for index, name in pairs}
    return [name_of[key] for key in images.keys]


def _record(
    model: TextImageModel,
    request: TextEvaluation,
    images: ImageRows,
    figures: Figures,
    protocol: Mapping[str, Any],
) -> Record:
    overlap = check_seen(
        find_seen(model.artifact).among(images.sha256),
        images.keys,
        model.artifact.path,
        may_be_seen=request.may_be_seen,
    )
    subject = {
        "features": "embedding",
        "engine": model.texts.engine,
        "precision": model.texts.precision,
        "fingerprint": model.texts.fingerprint,
        "test": f"{len(images.keys)} of {Path(request.test_images.location).name}",
        "not_usable": images.num_unusable,
    }
    return {
        "representation": model.texts.name,
        "digest": model.artifact.digest,
        "metrics": {**figures.metrics, "test_images": float(len(images.keys))},
        "intervals": {name: list(ends) for name, ends in figures.intervals.items()},
        "seen": overlap.facts(),
        "protocol": {**protocol, **subject},
    }


def _request(
    model: TextImageModel, request: TextEvaluation, settings: Mapping[str, Any], out: Path
) -> Request:
    engine = {"engine": model.texts.engine, "precision": model.texts.precision}
    config = {**settings, **engine, **({"seen": True} if request.may_be_seen else {})}
    parents = (model.artifact.as_parent_of(out, "model"), request.test_images.parent(out))
    return Request("evaluation", config, parents, model.texts.fingerprint)
