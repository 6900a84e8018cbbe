"""Makes a selection from embeddings: which images to keep, and why the others are left out."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact, Parent, Request, open_artifact
from mlcd.artifacts.selection import DECISIONS
from mlcd.pipelines.curation.decisions import CurateOptions, Decisions
from mlcd.pipelines.curation.leaving_out import (
    leave_out_duplicates,
    leave_out_issues,
    leave_out_leaks,
    sample_clusters,
)
from mlcd.pipelines.curation.selection_page import PAGE, selection_page
from mlcd.pipelines.embedded_images import open_embedded_images
from mlcd.pipelines.ownership import take_over
from mlcd.progress import Stages


@dataclass(frozen=True)
class CurateInputs:
    """The artifacts that decisions depend on.

    centers: clusters in which outliers are found, or from which images are sampled. against:
    embeddings of a test set; images too similar to its images are left out as leaks.
    """

    embeddings: EmbeddingsArtifact
    centers: Artifact | None = None
    against: EmbeddingsArtifact | None = None

    @classmethod
    def open(
        cls, embeddings: Path, *, centers: Path | None = None, against: Path | None = None
    ) -> "CurateInputs":
        return cls(
            EmbeddingsArtifact.open(embeddings),
            None if centers is None else open_artifact(centers, "centers"),
            None if against is None else EmbeddingsArtifact.open(against),
        )

    def check(self, options: CurateOptions) -> None:
        has_against = self.against is not None
        options.check(has_centers=self.centers is not None, has_against=has_against)

    def parents(self, out: Path) -> tuple[Parent, ...]:
        against = None if self.against is None else self.against.artifact
        roles = {
            "embeddings": self.embeddings.artifact,
            "centers": self.centers,
            "against": against,
        }
        artifacts = {role: artifact for role, artifact in roles.items() if artifact is not None}
        return tuple(artifact.as_parent_of(out, role) for role, artifact in artifacts.items())


class Curating:
    """One request for a selection; any process can carry it out."""

    def __init__(self, inputs: CurateInputs, options: CurateOptions, out: Path) -> None:
        """Raises the errors of `CurateOptions.check`."""
        inputs.check(options)
        self.inputs, self.options = inputs, options
        self.request = Request(
            "selection",
            options.identity(),
            inputs.parents(out),
            inputs.embeddings.fingerprint,
        )

    def has(self, draft: Draft) -> bool:
        """Returns whether the draft contains the decisions."""
        return draft.has(DECISIONS)

    def make(self, draft: Draft, reporter: Stages) -> None:
        """Decides on every image; writes the page of the report, then the decisions."""
        embeddings = self.inputs.embeddings
        decisions = decide(self.inputs, self.options, reporter, checkpoint_dir=draft.path)
        if self.options.report:
            page = selection_page(decisions, *open_embedded_images(embeddings))
            with draft.write(PAGE) as path:
                path.write_text(page, encoding="utf-8")
        with draft.write(DECISIONS) as path:
            pq.write_table(decisions.table(embeddings), path)

    def publish(self, draft: Draft) -> Artifact:
        return draft.publish(summary=Decisions.read(draft.path / DECISIONS).facts())


def curate(
    inputs: CurateInputs,
    out: Path,
    options: CurateOptions,
    reporter: Stages,
) -> Artifact:
    """Decides for each image whether to keep it, and writes `decisions.parquet` and, with
    `options.report`, a page of examples.

    A call that was killed resumes when repeated, and gives the same bytes. Raises the errors of
    `decide`.
    """
    curating = Curating(inputs, options, out)
    if (finished := find_published(out, curating.request)) is not None:
        return finished
    with Draft(out, curating.request) as draft:
        take_over(draft)
        if not curating.has(draft):
            curating.make(draft, reporter)
        return curating.publish(draft)


def decide(
    inputs: CurateInputs,
    options: CurateOptions,
    reporter: Stages,
    *,
    checkpoint_dir: Path | None = None,
) -> Decisions:
    """Returns the decision on each image.

    checkpoint_dir: folder for intermediate results; None disables them. Raises InvalidInput for a
    similarity out of range, NotFound if the images are missing, ConfigInvalid if centers or other
    embeddings are missing or of another model, or if a hierarchical sample lacks levels.
    """
    inputs.check(options)
    embeddings = inputs.embeddings
    decisions = Decisions.all_kept(embeddings.num_rows)
    if options.issues:
        leave_out_issues(embeddings, decisions, options, reporter, checkpoint_dir)
    if inputs.against is not None:
        leave_out_leaks(embeddings, inputs.against, decisions, options, reporter)
    if options.duplicates is not None:
        leave_out_duplicates(embeddings, decisions, options, reporter, checkpoint_dir)
    if inputs.centers is not None:
        sample_clusters(embeddings, decisions, options, inputs.centers)
    return decisions
