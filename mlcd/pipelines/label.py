"""Labels embeddings or images with their nearest centers: the labels artifact."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import pyarrow.parquet as pq

from mlcd.artifacts.centers import VECTORS, Centers
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import ERRORS, EmbeddingsArtifact
from mlcd.artifacts.labels import NAMES, part_name, write_part
from mlcd.artifacts.manifest import MANIFEST, Artifact, Request, open_artifact
from mlcd.clustering.nearest import BlockedScan
from mlcd.clustering.rows import FileRows
from mlcd.cores import available_cores
from mlcd.encoders import open_encoder
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.errors import ConfigInvalid
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.sources import open_source
from mlcd.pipelines.claims import Claims
from mlcd.pipelines.encoded import (
    OnDone,
    check_source,
    merge_errors,
    no_usable_image,
    write_errors,
)
from mlcd.pipelines.label_inputs import EmbeddingsInput, ImagesInput, LabelInput
from mlcd.pipelines.label_search import ApproximateSearch, ExactSearch, LabelSearch
from mlcd.pipelines.ownership import take_over
from mlcd.pipelines.workers import run_workers
from mlcd.progress import Meter, Reporter

PART_ROWS: Final = 65536


@dataclass(frozen=True)
class LabelOptions:
    """The options of labels, as plain values that can be sent to workers.

    source: an embeddings artifact, or images; images need a `model`. threshold: minimum cosine of a
    label; None for no limit. mode: "approximate" compares a row only with the centers in `probes`
    cells; None probes as many as an audit finds necessary. encoder: options to open the model with;
    workers set the number of threads. urls: how to fetch images that a table or a list names by
    URL. embeddings: also write the embeddings as a column. part_rows, part_entries: rows or images
    per committed part; part_entries None uses `choose_part_entries`. centers_at_once: number of
    centers in memory at a time, for exact labels; None for all.
    """

    source: str
    centers: str
    top: int = 8
    threshold: float | None = None
    mode: Literal["exact", "approximate"] = "exact"
    probes: int | None = None
    model: str | None = None
    encoder: EncoderOptions = DEFAULTS
    urls: UrlOptions | None = None
    embeddings: bool = False
    part_rows: int = PART_ROWS
    part_entries: int | None = None
    centers_at_once: int | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Reads the options back from the result of `asdict`."""
        urls = None if fields["urls"] is None else UrlOptions(**fields["urls"])
        return cls(**{**fields, "encoder": EncoderOptions(**fields["encoder"]), "urls": urls})

    def __post_init__(self) -> None:
        if self.threshold is not None and not -1.0 <= self.threshold <= 1.0:
            raise ConfigInvalid(
                f"the threshold must be a cosine between -1 and 1, got {self.threshold}"
            )
        if self.mode == "exact" and self.probes is not None:
            raise ConfigInvalid(
                f"--probes requires approximate labels, got --probes {self.probes}",
                remedy="leave out --probes",
            )


def label(options: LabelOptions, out: Path, *, workers: int = 1, reporter: Reporter) -> Artifact:
    """Finds the `top` nearest centers of every row; with a threshold, only centers of at least that
    cosine.

    Work is committed in parts: a rerun after a crash of this process or a worker makes only the
    missing parts and gives the same bytes. Raises ConfigInvalid if the centers are of another model
    than the rows.
    """
    with open_labeling(options, out, num_threads=available_cores()) as labeling:
        if (done := find_published(out, labeling.request)) is not None:
            return done
        with Draft(out, labeling.request) as draft:
            take_over(draft)
            labeling.prepare(draft)
            _make_missing_parts(labeling, draft, workers, reporter)
            return labeling.publish(draft)


class Labeling:
    """One request for labels with open input; makes any part of them."""

    def __init__(
        self,
        options: LabelOptions,
        rows: LabelInput,
        centers: Centers,
        search: LabelSearch,
        request: Request,
    ) -> None:
        self.options, self.rows, self.centers = options, rows, centers
        self.search, self.request = search, request
        self.sizes = rows.sizes

    @property
    def identity(self) -> str:
        """Returns the identity of the request as text, for workers to compare with theirs."""
        return json.dumps(self.request.identity(), sort_keys=True)

    def prepare(self, draft: Draft) -> None:
        """Prepares the search; called once, before the first part."""
        self.search.prepare(draft)

    def has(self, draft: Draft, part: int) -> bool:
        """Returns whether the part is finished."""
        return draft.has(part_name(part))

    def make(self, draft: Draft, part: int, on_done: OnDone) -> None:
        """Writes one part: first its notes, last its file, which marks the part as finished."""
        rows = self.rows.read(part, on_done)
        with draft.all_or_none(part_name(part)):
            neighbors = self.search.nearest(draft, part, rows.embeddings)
            write_errors(draft, part, rows.errors)
            vectors = rows.embeddings if self.options.embeddings else None
            write_part(
                draft,
                part,
                rows.keys,
                rows.image_sha256,
                neighbors,
                vectors,
                self.centers.label_columns,
            )
        on_done(self.sizes[part], len(rows.errors))

    def publish(self, draft: Draft) -> Artifact:
        """Publishes the draft; every part must be finished.

        Raises InvalidInput if no image could be used.
        """
        num_parts = len(self.sizes)
        num_rows = sum(
            pq.read_metadata(draft.path / part_name(part)).num_rows for part in range(num_parts)
        )
        summary: dict[str, Any] = {"images": num_rows, "centers": len(self.centers.vectors)}
        if isinstance(self.rows, ImagesInput):
            errors = merge_errors(draft, range(num_parts), self.rows.source.problems)
            if num_rows == 0:
                raise no_usable_image(self.rows.source, errors)
            summary["errors"] = len(errors)
        elif isinstance(self.rows, EmbeddingsInput):
            with draft.write(ERRORS) as path:
                shutil.copyfile(self.rows.embeddings.errors_file, path)
        if self.centers.names is not None:
            draft.write_json(NAMES, list(self.centers.names))
        summary |= self.search.summary(draft, range(num_parts))
        return draft.publish(summary=summary)


@contextmanager
def open_labeling(options: LabelOptions, out: Path, *, num_threads: int) -> Iterator[Labeling]:
    """Opens input and centers. Raises ConfigInvalid if they are of two models."""
    artifact = open_artifact(Path(options.centers), "centers")
    rows = _open_input(options, out, num_threads)
    centers = Centers.read(artifact, mapped=options.centers_at_once is not None)
    try:
        yield labeling_of(options, rows, artifact, centers, out)
    finally:
        rows.close()


def labeling_of(
    options: LabelOptions, rows: LabelInput, artifact: Artifact, centers: Centers, out: Path
) -> Labeling:
    """Returns the labeling of open `rows` by `centers`, which were read from `artifact`.

    Raises ConfigInvalid if both are of two models.
    """
    _check_fingerprint(rows, centers, options.centers)
    num_centers = len(centers.vectors)
    top = min(options.top, num_centers)
    search = _open_search(options, rows, centers, artifact, top)
    config = {
        "top": top,
        "threshold": options.threshold,
        "num_centers": num_centers,
        **({"embeddings": True} if options.embeddings else {}),
        **({"of_centers": sorted(centers.label_columns)} if centers.label_columns else {}),
        **search.config,
        **rows.config,
    }
    parents = (rows.parent(out), artifact.as_parent_of(out, "centers"))
    return Labeling(
        options, rows, centers, search, Request("labels", config, parents, rows.fingerprint)
    )


def _open_input(options: LabelOptions, out: Path, num_threads: int) -> LabelInput:
    if (Path(options.source) / MANIFEST).is_file():
        if options.model is not None:
            raise ConfigInvalid(
                f"--model requires images, got the artifact {options.source}",
                remedy="leave out --model",
            )
        return EmbeddingsInput(
            EmbeddingsArtifact.open(Path(options.source)), part_rows=options.part_rows
        )
    if options.model is None:
        raise ConfigInvalid(
            "without --model, the input must be a finished artifact of embeddings, got"
            f" {options.source}",
            remedy="finish `mlcd embed`, or give --model to label images",
        )
    source = open_source(options.source, urls=options.urls)
    check_source(source, out)
    encoder = open_encoder(options.model, replace(options.encoder, num_threads=num_threads))
    return ImagesInput(source, encoder, part_entries=options.part_entries, num_threads=num_threads)


def _open_search(
    options: LabelOptions, rows: LabelInput, centers: Centers, artifact: Artifact, top: int
) -> LabelSearch:
    if options.mode == "exact":
        scan = None
        if options.centers_at_once is not None:
            scan = BlockedScan(FileRows([artifact.file(VECTORS)]), options.centers_at_once)
        return ExactSearch(centers, top=top, threshold=options.threshold, scan=scan)
    if not isinstance(rows, EmbeddingsInput):
        raise ConfigInvalid(
            "approximate labels need an artifact of embeddings, got images",
            remedy="run `mlcd embed` first",
        )
    return ApproximateSearch(
        centers, rows, top=top, threshold=options.threshold, probes=options.probes
    )


def _check_fingerprint(rows: LabelInput, centers: Centers, centers_path: str) -> None:
    if centers.fingerprint != rows.fingerprint:
        raise ConfigInvalid(
            f"{centers_path} and {rows.name} must be of the same model, got two models"
            f" ({centers.fingerprint[:12]} and {rows.fingerprint[:12]})",
            remedy="embed the images with the model of the centers, or cluster these embeddings",
        )


def make_parts(
    labeling: Labeling, draft: Draft, *, wait: bool, on_progress: Callable[[int, int], None]
) -> None:
    """Makes every missing part that no other process is making.

    wait: wait for parts that other processes make, and make them if those processes die.
    on_progress: called with (part, number of its rows or images done).
    """
    with Claims(draft.path) as claims:
        for part in range(len(labeling.sizes)):
            if draft.has(part_name(part)):
                continue
            with claims.hold(part, wait=wait) as is_held:
                if is_held and not draft.has(part_name(part)):
                    labeling.make(
                        draft,
                        part,
                        lambda done, _, part=part: on_progress(part, done),  # type: ignore[misc]
                    )


def _make_missing_parts(labeling: Labeling, draft: Draft, workers: int, reporter: Reporter) -> None:
    missing = [part for part in range(len(labeling.sizes)) if not draft.has(part_name(part))]
    done = sum(labeling.sizes) - sum(labeling.sizes[part] for part in missing)
    num_workers = min(workers, len(missing))
    with reporter.stage("label", sum(labeling.sizes), done=done) as meter:
        progress = _Progress(meter)
        if num_workers <= 1:
            with labeling.rows.ahead(missing):
                make_parts(labeling, draft, wait=True, on_progress=progress)
            return
        labeling.rows.close()  # the workers open their own input
        num_threads = max(1, available_cores() // num_workers)
        task = {
            "options": asdict(labeling.options),
            "out": str(draft.out),
            "identity": labeling.identity,
            "num_threads": num_threads,
        }
        run_workers(
            "mlcd.pipelines.label_worker",
            task,
            num_workers=num_workers,
            num_threads=num_threads,
            finished=lambda: all(draft.has(part_name(part)) for part in missing),
            on_progress=progress,
        )


class _Progress:
    """Reports progress from (part, number of rows or images done); rows that a dead worker had done
    are not counted twice.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._done: Counter[int] = Counter()

    def __call__(self, part: int, done: int) -> None:
        self._meter.advance(max(0, done - self._done[part]))
        self._done[part] = max(done, self._done[part])
