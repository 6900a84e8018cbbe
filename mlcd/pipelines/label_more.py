"""Labels rows or images that were added to a source since it was labeled."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.addition import first_part_after, open_addition
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact, errors_name_from
from mlcd.artifacts.labels import LabelTable, part_name
from mlcd.artifacts.manifest import GROWN, Artifact, Parent, open_artifact
from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.pipelines.encoded import OnDone, merge_errors
from mlcd.pipelines.label import Labeling, LabelOptions, open_labeling
from mlcd.pipelines.label_inputs import EmbeddingsInput, ImagesInput, LabelRows
from mlcd.progress import Reporter


def label_more(options: LabelOptions, out: Path, reporter: Reporter) -> Artifact:
    """Adds labels of rows that `mlcd embed --append` has added, or of images that the source has
    gained; existing labels stay.

    Images that could not be used before are tried again. If the call is killed, the labels are in
    their old or their new state, and a repeated call resumes. Raises ConfigInvalid for approximate
    labels, Conflict for labels made from other input or settings.
    """
    if options.mode != "exact":
        raise ConfigInvalid(
            "adding needs exact labels, got approximate ones, which are audited as a whole",
            remedy="label everything to another output",
        )
    labels = open_artifact(out, "labels", verify_files=False)
    # a job may have added the column of embeddings and used parts of another size
    options = replace(
        options,
        embeddings=labels.config.get("embeddings", False),
        part_entries=labels.config.get("part_entries"),
    )
    with open_labeling(options, out, num_threads=available_cores()) as labeling:
        first_part = sum(name.startswith("part-") for name in labels.files)
        if isinstance(labeling.rows, ImagesInput):
            return _add_images(labels, labeling, labeling.rows, first_part, reporter)
        assert isinstance(labeling.rows, EmbeddingsInput)
        embeddings = labeling.rows.embeddings
        if _covers_all_rows(labels, embeddings, labeling):
            return labels
        if first_part == len(labeling.sizes):  # none of the added images could be used
            return labels
        return _add_rows(labels, embeddings, labeling, first_part, reporter)


class _NewImages:
    """The `LabelInput` protocol over images without labels; their parts start at `first_part`."""

    def __init__(self, images: ImagesInput, new: ImagesInput, first_part: int) -> None:
        self.name, self.fingerprint, self.config = images.name, images.fingerprint, images.config
        self.sizes = [0] * first_part + new.sizes
        self._new, self._first_part = new, first_part

    def parent(self, out: Path) -> Parent:
        return self._new.parent(out)

    def ahead(self, parts: Sequence[int]) -> AbstractContextManager[None]:
        return self._new.ahead([part - self._first_part for part in parts])

    def read(self, part: int, on_done: OnDone) -> LabelRows:
        return self._new.read(part - self._first_part, on_done)

    def close(self) -> None: ...


def _add_images(
    labels: Artifact, labeling: Labeling, images: ImagesInput, first_part: int, reporter: Reporter
) -> Artifact:
    _check_made_from_images(labels, labeling)
    table = LabelTable(labels)
    new_keys = sorted(set(images.source.entries.keys()) - set(table.keys))
    if not new_keys:
        return labels
    source = images.source.only(pa.chunked_array([pa.array(new_keys, pa.large_string())]))
    rows = _NewImages(images, images.of(source), first_part)
    adding = Labeling(labeling.options, rows, labeling.centers, labeling.search, labeling.request)
    parts = range(first_part, len(rows.sizes))
    with open_addition(labels, labeling.request.parents, first_part) as addition:
        draft = addition.draft
        missing = [part for part in parts if not adding.has(draft, part)]
        done = len(new_keys) - sum(rows.sizes[part] for part in missing)
        with reporter.stage("label", len(new_keys), done=done) as meter, rows.ahead(missing):
            for part in missing:
                adding.make(draft, part, lambda _done, _errors: None)
                meter.advance(rows.sizes[part])
        errors = merge_errors(draft, parts, images.source.problems, errors_name_from(first_part))
        num_rows = _count_rows(draft, parts)
        if not num_rows:  # the same images failed again
            addition.discard()
            return labels
        totals = _add_counts(labels.summary, labeling.search.summary(draft, parts))
        counts = {"images": labels.summary["images"] + num_rows, "errors": len(errors)}
        return addition.publish({**totals, **counts, "added": num_rows})


def _check_made_from_images(labels: Artifact, labeling: Labeling) -> None:
    parents_before = {parent.role: parent for parent in labels.parents}
    parents_now = {parent.role: parent for parent in labeling.request.parents}
    config = {name: value for name, value in labels.config.items() if name != GROWN}
    if (
        config != dict(labeling.request.config)
        or labels.fingerprint != labeling.rows.fingerprint
        or parents_before["centers"].digest != parents_now["centers"].digest
        or "images" not in parents_before
        or parents_before["images"].path != parents_now["images"].path
    ):
        raise _other_input_error(labels)


def _count_rows(draft: Draft, parts: range) -> int:
    return sum(pq.read_metadata(draft.path / part_name(part)).num_rows for part in parts)


def _add_rows(
    labels: Artifact,
    embeddings: EmbeddingsArtifact,
    labeling: Labeling,
    first_part: int,
    reporter: Reporter,
) -> Artifact:
    parts = range(first_part, len(labeling.sizes))
    with open_addition(labels, labeling.request.parents, first_part) as addition:
        draft = addition.draft
        missing = [part for part in parts if not labeling.has(draft, part)]
        total, num_missing = (
            sum(labeling.sizes[part] for part in chosen_parts) for chosen_parts in (parts, missing)
        )
        with reporter.stage("label", total, done=total - num_missing) as meter:
            for part in missing:
                labeling.make(draft, part, lambda _done, _errors: None)
                meter.advance(labeling.sizes[part])
        with draft.write(errors_name_from(first_part)) as path:
            shutil.copyfile(embeddings.errors_file, path)
        num_rows = _count_rows(draft, parts)
        totals = _add_counts(labels.summary, labeling.search.summary(draft, parts))
        return addition.publish(
            {**totals, "images": labels.summary["images"] + num_rows, "added": num_rows}
        )


def _covers_all_rows(labels: Artifact, embeddings: EmbeddingsArtifact, labeling: Labeling) -> bool:
    """Returns whether the labels cover all rows. Raises Conflict if they were made from other input
    or settings.
    """
    digests_before = {parent.role: parent.digest for parent in labels.parents}
    digests_now = {parent.role: parent.digest for parent in labeling.request.parents}
    config = {name: value for name, value in labels.config.items() if name != GROWN}
    same_settings = (
        config == dict(labeling.request.config)
        and digests_before.get("centers") == digests_now["centers"]
    )
    same_embeddings = digests_before.get("embeddings") == digests_now["embeddings"]
    if not same_settings or not (
        same_embeddings
        or first_part_after(embeddings.artifact, digests_before.get("embeddings", "")) is not None
    ):
        raise _other_input_error(labels)
    return same_embeddings


def _other_input_error(labels: Artifact) -> Conflict:
    return Conflict(
        f"{labels.path} contains labels made from other input or settings",
        remedy="give the input, centers and options of these labels, or another output",
    )


def _add_counts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns `old` with the counts of `new` added; both are summaries of exact labels."""
    scans = old["scan"], new["scan"]
    levels = {name: sum(scan[name] for scan in scans) for name in scans[0] if name != "products"}
    products = sorted({product for scan in scans for product in scan["products"]})
    counts = {name: old[name] + new[name] for name in new if name != "scan"}
    return {**old, **counts, "scan": {"products": products, **levels}}
