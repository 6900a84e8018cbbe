"""Names centers without a text tower: by captions, or by a metadata field of a collection."""

import logging
from pathlib import Path
from typing import Final

import numpy as np

from mlcd.artifacts.given_names import fits_a_name
from mlcd.artifacts.labels import LabelTable
from mlcd.clustering.nearest import CenterScan
from mlcd.collections.clusters import Clusters
from mlcd.collections.collection import Collection
from mlcd.collections.columns import Column, Scalar
from mlcd.errors import InvalidInput
from mlcd.images.matched_keys import match_keys
from mlcd.naming.chosen_names import LEAST_SHARE
from mlcd.naming.term_scores import class_tf_idf, contrast
from mlcd.naming.terms import MemberTerms, tokens
from mlcd.pipelines.name import Members, Naming, name_members, open_centers
from mlcd.pipelines.text_files import TextFile
from mlcd.types import Embeddings, Neighbors

_log = logging.getLogger(__name__)

_SHOWN_CAPTION: Final = 200  # characters of a caption in the evidence


def name_by_captions(
    path: Path,
    captions: TextFile,
    labels: Path,
    *,
    least_share: float = LEAST_SHARE,
    may_be_unmatched: bool = False,
) -> Naming:
    """Names the centers at `path` by the words of their members' captions.

    captions: captions by image key. labels: labels of these images, for the center of each.
    may_be_unmatched: skip and log captions without a labeled image. Raises InvalidInput for labels
    of other centers, and for captions without a labeled image unless those may be unmatched.
    """
    artifact, _ = open_centers(path)
    table = LabelTable.open(labels)
    if table.classes != artifact.digest:
        raise InvalidInput(
            f"{labels} must be labels of the centers {path}", remedy=f"label with --centers {path}"
        )
    centers = np.concatenate([ids for ids, _ in table.first_labels()])
    matched = match_keys(captions.keys, table.read_keys(), str(captions.path))
    matched.unmatched.check(str(captions.path), str(labels), may_be_unmatched=may_be_unmatched)
    if matched.unmatched.num:
        _log.warning("%s: %s", captions.path, matched.unmatched)
    captioned = [
        (key, text, int(centers[index]))
        for key, text, index in zip(
            captions.keys, captions.texts, matched.indices.tolist(), strict=True
        )
        if index >= 0 and isinstance(text, str)
    ]
    if not captioned:
        raise InvalidInput(
            f"{captions.path} must contain texts of the images in {labels}, found none"
        )
    term_lists = [[term for term in tokens(text) if fits_a_name(term)] for _, text, _ in captioned]
    members = Members(
        MemberTerms.of_lists(term_lists),
        np.array([center for _, _, center in captioned]),
        class_tf_idf,
        {
            "method": "captions",
            "captions": {"sha256": captions.sha256, "used": len(captioned)},
            "labels": table.artifact.digest,
        },
        [{"key": key, "caption": text[:_SHOWN_CAPTION]} for key, text, _ in captioned],
    )
    return name_members(path, members, least_share=least_share)


def name_by_metadata(
    path: Path, field: str, collection: Path, *, least_share: float = LEAST_SHARE
) -> Naming:
    """Names the centers at `path` by a metadata field of their members in a collection.

    Raises InvalidInput if no item has the field, or if the collection is of another model.
    """
    artifact, centers = open_centers(path)
    scan = CenterScan(centers.vectors)

    def nearest(vectors: Embeddings) -> Neighbors:
        return scan.nearest(centers.align(vectors), 1)

    with Collection.open(collection, read_only=True) as opened:
        opened.check_fingerprint(centers.fingerprint)
        clusters = opened.clusters(
            artifact.digest, num_centers=len(centers.vectors), nearest=nearest
        )
        column = clusters.state.columns.find(field)
        if column is None:
            raise InvalidInput(
                f"an item of {collection} must have the field {field!r}, found none",
                remedy="give one of its fields:"
                f" {', '.join(clusters.state.columns.names()) or 'none yet'}",
            )
        term_lists = _read_values(clusters, column)
    terms = MemberTerms.of_lists(term_lists)
    assignment = np.repeat(np.arange(len(clusters.num_members)), clusters.num_members)
    facts = {"method": "metadata", "field": field, "items": len(term_lists)}
    return name_members(path, Members(terms, assignment, contrast, facts), least_share=least_share)


def _read_values(clusters: Clusters, column: Column) -> list[list[str]]:
    """Returns the values of each member that can be names; members in the order of the clusters."""
    codes = column.codes(clusters.state.num_positions)[clusters.positions].tolist()
    texts = [
        [text for value in values if (text := _to_text(value)) and fits_a_name(text)]
        for values in column.values
    ]
    return [texts[code] if code >= 0 else [] for code in codes]


def _to_text(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else value.strip()
