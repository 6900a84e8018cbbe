"""The labels of rows that were added to embeddings since they were labeled."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mlcd.artifacts.addition import first_part_after, open_addition
from mlcd.artifacts.embeddings import EmbeddingsArtifact, added_errors_name
from mlcd.artifacts.labels import part_name
from mlcd.artifacts.manifest import GROWN, Artifact, open_artifact
from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.parts.label_inputs import EmbeddingsInput
from mlcd.pipelines.label import Labeling, LabelOptions, open_labeling
from mlcd.progress import Reporter


def label_more(options: LabelOptions, out: Path, reporter: Reporter) -> Artifact:
    """Adds labels of the rows that `mlcd embed --append` has added; existing labels stay.

    Killed at any moment, the labels are in their old or their new state, and the same call
    continues. Raises ConfigInvalid for labels that cannot be added to, Conflict where they were
    made from other input or settings.
    """
    if options.mode != "exact":
        raise ConfigInvalid(
            "approximate labels are audited as a whole", remedy="label to another output"
        )
    labels = open_artifact(out, "labels", verify_files=False)
    with open_labeling(options, out, num_threads=available_cores()) as labeling:
        if not isinstance(labeling.rows, EmbeddingsInput):
            raise ConfigInvalid(
                "labels of images are made at once", remedy="`mlcd embed --append`, and label that"
            )
        embeddings = labeling.rows.embeddings
        if _was_made_from(labels, embeddings, labeling):
            return labels
        first = sum(name.startswith("part-") for name in labels.files)
        if first == len(labeling.sizes):  # none of the added images could be used
            return labels
        return _add(labels, embeddings, labeling, first, reporter)


def _add(
    labels: Artifact,
    embeddings: EmbeddingsArtifact,
    labeling: Labeling,
    first: int,
    reporter: Reporter,
) -> Artifact:
    parts = range(first, len(labeling.sizes))
    with open_addition(labels, labeling.request.parents, first) as addition:
        draft = addition.draft
        missing = [part for part in parts if not labeling.has(draft, part)]
        total, left = (sum(labeling.sizes[part] for part in some) for some in (parts, missing))
        with reporter.stage("label", total, done=total - left) as meter:
            for part in missing:
                labeling.make(draft, part, lambda _done, _errors: None)
                meter.advance(labeling.sizes[part])
        with draft.write(added_errors_name(first)) as path:
            shutil.copyfile(embeddings.errors_file, path)
        num_rows = sum(pq.read_metadata(draft.path / part_name(part)).num_rows for part in parts)
        found = _added_up(labels.summary, labeling.search.summary(draft, parts))
        return addition.publish(
            {**found, "images": labels.summary["images"] + num_rows, "added": num_rows}
        )


def _was_made_from(labels: Artifact, embeddings: EmbeddingsArtifact, labeling: Labeling) -> bool:
    """Tells whether the labels cover all rows. Raises Conflict where they were made from other
    input.
    """
    made = {parent.role: parent.digest for parent in labels.parents}
    now = {parent.role: parent.digest for parent in labeling.request.parents}
    config = {name: value for name, value in labels.config.items() if name != GROWN}
    alike = config == dict(labeling.request.config) and made.get("centers") == now["centers"]
    is_same = made.get("embeddings") == now["embeddings"]
    if not alike or not (
        is_same or first_part_after(embeddings.artifact, made.get("embeddings", "")) is not None
    ):
        raise Conflict(
            f"{labels.path} holds labels made from other input or settings",
            remedy="give the centers and options that it was made with, "
            "or another output directory",
        )
    return is_same


def _added_up(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Adds up the counts of two summaries of exact labels."""
    scans = old["scan"], new["scan"]
    levels = {name: sum(scan[name] for scan in scans) for name in scans[0] if name != "products"}
    products = sorted({product for scan in scans for product in scan["products"]})
    counted = {name: old[name] + new[name] for name in new if name != "scan"}
    return {**old, **counted, "scan": {"products": products, **levels}}
