"""Embeddings to the Centers artifact: streamed, by one process or several, resumable after every
iteration.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.center_levels import write_levels
from mlcd.artifacts.centers import Centers, majority_names
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import EmbeddingsArtifact, part_name
from mlcd.artifacts.examples import Examples
from mlcd.artifacts.manifest import Artifact, Request, verify_file
from mlcd.clustering.approximate import AUDITED_ROWS, MIN_AUDITED_ROWS, MIN_CENTERS
from mlcd.clustering.choice import Candidate, best, candidates
from mlcd.clustering.exact_scores import exact_scores
from mlcd.clustering.kmeans import MANY_CLUSTERS, KMeansResult, Progress, State, kmeans
from mlcd.clustering.kmeans_plan import Plan
from mlcd.clustering.kmeans_plan import plan as plan_clustering
from mlcd.clustering.levels import build_levels, check_levels, composed
from mlcd.clustering.members import NUM_EXAMPLES, NearestMembers
from mlcd.clustering.quality import (
    adjusted_rand_index,
    conflict_rate,
    imbalance,
    near_duplicates,
    normalized_mutual_information,
    purity,
    size_histogram,
    tightness,
)
from mlcd.clustering.rows import FileRows, Rows, SelectedRows, UnitRows, lowest_hashed
from mlcd.clustering.seeding import sampled
from mlcd.clustering.sums import mean_of
from mlcd.errors import InvalidInput
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.parts.histogram import draw_histogram
from mlcd.progress import Meter, Reporter
from mlcd.world import World

REPORT: Final = "report.json"
PICTURE: Final = "sizes.png"
CHECKPOINT: Final = ".checkpoint.npz"
_ITERATIONS, _ITERATIONS_OF_MANY = 25, 3
# first counter of the hash, so that the audited rows are not the first centers
_AUDITED_STREAM: Final = 2
_ALONE: Final = World()


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options that decide the centers.

    names: name each center by the majority of its members' known classes, for people only.
    iterations: at most; None for 25, or 3 after a two-level start (above 16,384 clusters).
    hold_out: share of each class left out, as in training and evaluation. sample: cluster only so
    many rows for each cluster, drawn by hash. subtract_mean: compare rows after subtracting their
    mean, which becomes part of the centers. examples: the keys of so many nearest members of each
    center become part of them. levels: the numbers of clusters of coarser levels, ever smaller.
    chosen_of: the curve of the numbers that `num_clusters` was chosen of.
    """

    num_clusters: int
    iterations: int | None = None
    seed: int = 0
    hold_out: float = HELD_OUT_FRACTION
    sample: int | None = None
    subtract_mean: bool = False
    names: bool = False
    report: bool = False
    examples: int = NUM_EXAMPLES
    levels: Sequence[int] = ()
    chosen_of: Sequence[Candidate] = ()

    @property
    def passes(self) -> int:
        """Returns the largest number of updates."""
        if self.iterations is not None:
            return self.iterations
        return _ITERATIONS if self.num_clusters <= MANY_CLUSTERS else _ITERATIONS_OF_MANY

    def identity(self) -> dict[str, Any]:
        """Returns the options for the manifest; options added in later versions appear only where
        they are used.
        """
        chosen = asdict(self) | {"iterations": self.passes, "levels": list(self.levels)}
        chosen["chosen_of"] = [candidate.clusters for candidate in self.chosen_of]
        defaults: dict[str, Any] = {
            "sample": None,
            "report": False,
            "examples": NUM_EXAMPLES,
            "levels": [],
            "chosen_of": [],
        }
        return {
            name: value
            for name, value in chosen.items()
            if name not in defaults or value != defaults[name]
        }


def cluster(
    embeddings: EmbeddingsArtifact,
    out: Path,
    options: ClusterOptions,
    *,
    reporter: Reporter,
    world: World = _ALONE,
) -> Artifact:
    """Runs spherical k-means on the rows that are not held out; the first process writes.

    Every iteration leaves a checkpoint in the draft: killed at any moment, the same call ends with
    the same bytes.
    """
    check_levels((options.num_clusters, *options.levels))
    request = Request(
        "centers",
        options.identity(),
        (embeddings.artifact.as_parent_of(out, "embeddings"),),
        embeddings.fingerprint,
    )
    if (done := find_published(out, request)) is not None:
        return done
    numbers = _clustered(embeddings, options)
    writes = world.rank == 0
    with Draft(out, request) if writes else nullcontext() as draft:
        for part in range(world.rank, embeddings.num_parts, world.size):
            verify_file(embeddings.artifact, part_name(part))
        rows, numbers = _select(embeddings, numbers, options)
        mean = _checked_mean(rows, world) if options.subtract_mean else None
        start = world.share(_saved_state(draft) if draft else None)
        with reporter.stage(
            "cluster", options.passes + 1, done=start.iteration if start else 0
        ) as meter:
            result = kmeans(
                UnitRows(rows, mean),
                options.num_clusters,
                iterations=options.passes,
                seed=options.seed,
                start=start,
                world=world,
                on_start=lambda state: _save_state(draft, state) if draft else None,
                on_iteration=lambda progress: _show(meter, progress),
            )
        assignment = _gathered(result.assignment, rows.num_rows, world)
        nearest = (
            _nearest_members(UnitRows(rows, mean), result, options.examples, world)
            if options.examples
            else None
        )
        if draft:
            classes = _chosen(embeddings.class_names, numbers)
            Centers(
                vectors=result.centers,
                sizes=result.sizes,
                fingerprint=embeddings.fingerprint,
                names=majority_names(assignment, classes, options.num_clusters)
                if options.names
                else None,
                mean=mean,
                examples=None if nearest is None else _examples(nearest, embeddings, numbers),
                audit_rows=_audit_rows(embeddings, numbers)
                if options.num_clusters >= MIN_CENTERS
                else None,
            ).write(draft)
            summary = _summary(result, assignment, classes)
            if options.chosen_of:
                summary["chosen_of"] = [asdict(candidate) for candidate in options.chosen_of]
            if options.levels:
                summary["levels"] = _write_coarser(draft, result, options)
            summary["held_out"] = (
                int(embeddings.held_out(options.hold_out).sum()) if options.hold_out else 0
            )
            if options.report:
                summary |= _write_report(draft, result, assignment, classes)
            draft.publish(summary=summary, logs=(REPORT, PICTURE))
    world.share(None)  # no process looks for the artifact before it exists
    published = find_published(out, request)
    assert published is not None
    return published


def choose_number(
    embeddings: EmbeddingsArtifact, options: ClusterOptions, nums: Sequence[int]
) -> ClusterOptions:
    """Returns the options with the number of clusters at which unseen rows are best separated."""
    least = replace(options, num_clusters=min(nums), sample=None)
    rows, _ = _select(embeddings, _clustered(embeddings, least), least)
    mean = _checked_mean(rows, _ALONE) if options.subtract_mean else None
    found = candidates(UnitRows(rows, mean), nums, seed=options.seed)
    return replace(options, num_clusters=best(found), chosen_of=found)


def plan(embeddings: EmbeddingsArtifact, options: ClusterOptions, *, world: World = _ALONE) -> Plan:
    """Returns the cost of `cluster` with the same arguments, and writes nothing."""
    rows, _ = _select(embeddings, _clustered(embeddings, options), options)
    return plan_clustering(
        rows.num_rows,
        options.num_clusters,
        rows.dimension,
        iterations=options.passes,
        processes=world.size,
    )


def clustered_rows(
    embeddings: EmbeddingsArtifact, options: ClusterOptions
) -> NDArray[np.int64] | None:
    """Returns the numbers of the rows that `cluster` with the same arguments uses; None for all."""
    return _select(embeddings, _clustered(embeddings, options), options)[1]


class _KeyedRows(FileRows):
    """The rows of an artifact; errors name them by their keys."""

    def __init__(self, embeddings: EmbeddingsArtifact) -> None:
        super().__init__(
            [embeddings.artifact.file(part_name(part)) for part in range(embeddings.num_parts)]
        )
        self._embeddings = embeddings

    def describe(self, row: int) -> str:
        return f"embeddings row {row} ({self._embeddings.keys[row]})"


def _clustered(embeddings: EmbeddingsArtifact, options: ClusterOptions) -> NDArray[np.int64] | None:
    """Returns the numbers of the rows that are not held out; None for all."""
    kept = ~embeddings.held_out(options.hold_out) if options.hold_out else None
    num_kept = embeddings.num_rows if kept is None else int(kept.sum())
    if options.num_clusters > num_kept:
        raise InvalidInput(
            f"{options.num_clusters} clusters were asked of {num_kept} embeddings",
            remedy=f"ask for at most {num_kept} clusters, or hold out fewer than"
            f" {options.hold_out:g} of the rows"
            if num_kept
            else "embed more images, or hold out fewer",
        )
    return None if kept is None else np.flatnonzero(kept)


def _select(
    embeddings: EmbeddingsArtifact, numbers: NDArray[np.int64] | None, options: ClusterOptions
) -> tuple[Rows, NDArray[np.int64] | None]:
    """Returns (the rows to cluster, their numbers in the artifact or None for all)."""
    rows: Rows = _KeyedRows(embeddings)
    if numbers is not None:
        rows = SelectedRows(rows, numbers)
    if options.sample is None:
        return rows, numbers
    drawn = sampled(rows, options.sample * options.num_clusters, options.seed)
    if drawn is rows:
        return rows, numbers
    assert isinstance(drawn, SelectedRows)
    return drawn, drawn.selected if numbers is None else numbers[drawn.selected]


def _chosen(names: list[str | None], numbers: NDArray[np.int64] | None) -> list[str | None]:
    return names if numbers is None else [names[row] for row in numbers]


def _checked_mean(rows: Rows, world: World) -> NDArray[np.float32]:
    mean = mean_of(UnitRows(rows), world)
    if all(np.allclose(block, mean, atol=1e-6) for _, block in rows.blocks(0, rows.num_rows)):
        raise InvalidInput(
            "the images are all alike", remedy="give different ones: there is nothing to cluster"
        )
    return mean


def _save_state(draft: Draft, state: State) -> None:
    with draft.write(CHECKPOINT) as path, path.open("wb") as file:
        np.savez(
            file,
            centers=state.centers,
            counts=np.array([state.iteration, state.repaired, state.num_splits]),
            objective=np.array(state.objective, dtype=np.float64),
            request=np.array(_request_text(draft)),
        )


def _saved_state(draft: Draft) -> State | None:
    """Returns the state where an earlier attempt at the same request stopped; its checkpoint names
    input and settings.
    """
    if not draft.has(CHECKPOINT):
        return None
    try:
        # numpy leaves a file that it opened and cannot read to the garbage collector.
        with (
            (draft.path / CHECKPOINT).open("rb") as file,
            np.load(file, allow_pickle=False) as saved,
        ):
            if str(saved["request"]) != _request_text(draft):
                return None
            iteration, repaired, num_splits = (int(count) for count in saved["counts"])
            history = tuple(float(value) for value in saved["objective"])
            return State(saved["centers"], iteration, history, repaired, num_splits)
    except (
        OSError,
        ValueError,
        KeyError,
        BadZipFile,
    ):  # a damaged checkpoint: the same centers are found from the start
        return None


def _request_text(draft: Draft) -> str:
    return json.dumps(draft.request.identity(), sort_keys=True)


def _show(meter: Meter, progress: Progress) -> None:
    meter.advance(
        1,
        objective=progress.objective,
        imbalance=progress.imbalance,
        moved=progress.moved,
        rows_per_s=progress.rows_per_s,
    )


def _gathered(own: NDArray[np.int32], num_rows: int, world: World) -> NDArray[np.int32]:
    if world.size == 1:
        return own
    every = np.zeros(num_rows, dtype=np.int32)
    every[slice(*world.own_rows(num_rows))] = own
    return world.sum_integers(every)


def _nearest_members(
    rows: Rows, result: KMeansResult, num_each: int, world: World
) -> NearestMembers:
    """Returns the nearest members of every center; only a further reading of the rows knows the
    final centers.
    """
    nearest = NearestMembers(len(result.centers), num_each)
    start, stop = world.own_rows(rows.num_rows)
    for first, block in rows.blocks(start, stop):
        centers = result.assignment[first - start :][: len(block)]
        scores = exact_scores(block, result.centers, np.arange(len(block)), centers)
        # Rows are unit only within the rounding of float16, which a cosine would show.
        cosines = scores / np.linalg.norm(block.astype(np.float64), axis=1)
        nearest.add(centers, cosines, np.arange(first, first + len(block)))
    nearest.gather(world)
    return nearest


def _examples(
    nearest: NearestMembers, embeddings: EmbeddingsArtifact, numbers: NDArray[np.int64] | None
) -> Examples:
    present = nearest.rows >= 0
    rows = nearest.rows[present]
    keys = embeddings.keys_at(rows if numbers is None else numbers[rows])
    return Examples.of(keys, present.sum(axis=1), nearest.scores[present].astype(np.float32))


def _write_coarser(
    draft: Draft, result: KMeansResult, options: ClusterOptions
) -> list[dict[str, Any]]:
    """Writes the coarser levels and returns their part of the summary."""
    levels = build_levels(
        result.centers, result.sizes, result.cosines, options.levels, seed=options.seed
    )
    groups = composed(levels)
    write_levels(draft, result.sizes, groups, [level.centers for level in levels])
    return [
        {
            "clusters": len(level.centers),
            "objective": level.objective,
            "imbalance": imbalance(np.bincount(of, weights=result.sizes)),
        }
        for level, of in zip(levels, groups, strict=True)
    ]


def _audit_rows(
    embeddings: EmbeddingsArtifact, numbers: NDArray[np.int64] | None
) -> NDArray[np.float16]:
    """Returns rows that were not clustered, drawn by hash; where those are too few, any rows.

    The result is [n, D] as the model gives the rows.
    """
    if numbers is not None and embeddings.num_rows - len(numbers) >= MIN_AUDITED_ROWS:
        others = np.delete(np.arange(embeddings.num_rows), numbers)
        drawn = others[lowest_hashed(len(others), AUDITED_ROWS, _AUDITED_STREAM)]
    else:
        drawn = lowest_hashed(embeddings.num_rows, AUDITED_ROWS, _AUDITED_STREAM)
    return UnitRows(_KeyedRows(embeddings)).read(np.sort(drawn)).astype(np.float16)


def _summary(
    result: KMeansResult, assignment: NDArray[np.int32], class_names: Sequence[str | None]
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "rows": len(assignment),
        "clusters": len(result.centers),
        "objective": result.objective[-1],
        "objective_history": list(result.objective),
        "imbalance": imbalance(result.sizes),
        "smallest": int(result.sizes.min()),
        "largest": int(result.sizes.max()),
        "empty": int((result.sizes == 0).sum()),
        "splits": result.num_splits,
    }
    members, classes = _known(assignment, class_names)
    if classes:
        summary["purity"] = purity(members, classes)
        summary["nmi"] = normalized_mutual_information(members, classes)
    return summary


def _known(
    assignment: NDArray[np.int32], class_names: Sequence[str | None]
) -> tuple[NDArray[np.int32], list[str]]:
    rows = [row for row, name in enumerate(class_names) if name is not None]
    return assignment[rows], [str(class_names[row]) for row in rows]


def _write_report(
    draft: Draft,
    result: KMeansResult,
    assignment: NDArray[np.int32],
    class_names: Sequence[str | None],
) -> dict[str, Any]:
    """Writes report.json and sizes.png, and returns their part of the summary."""
    members, classes = _known(assignment, class_names)
    histogram = size_histogram(result.sizes)
    extra: dict[str, Any] = {
        "sizes": [{"at_least": smallest, "clusters": count} for smallest, count in histogram],
        "intra_cluster_cosine": tightness(result.sizes, result.cosines),
        "near_duplicate_centers": near_duplicates(result.centers),
    }
    if classes:
        extra["ari"] = adjusted_rand_index(members, classes)
        extra["conflict_rate"] = conflict_rate(members, classes)
    draft.write_json(REPORT, _summary(result, assignment, class_names) | extra)
    with draft.write(PICTURE) as path:
        draw_histogram(histogram, "clusters by number of members").save(path, format="PNG")
    return extra
