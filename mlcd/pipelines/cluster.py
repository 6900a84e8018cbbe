"""Clusters embeddings into a Centers artifact: streamed, by one process or several, resumable after
every iteration.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers, majority_names
from mlcd.artifacts.cluster_members import write_members
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import EmbeddingsArtifact, part_name
from mlcd.artifacts.manifest import Artifact, Request, verify_file
from mlcd.clustering.approximate import AUDITED_ROWS, MIN_AUDITED_ROWS, MIN_CENTERS
from mlcd.clustering.bounded_sizes import BOUNDED_ROW_BYTES, TURNS, bound_sizes, checked_bound
from mlcd.clustering.choice import Candidate, best, candidates
from mlcd.clustering.kmeans import (
    MANY_CLUSTERS,
    KMeansResult,
    MemberSums,
    Progress,
    State,
    kmeans,
)
from mlcd.clustering.kmeans_plan import CENTER_BYTES, Plan
from mlcd.clustering.kmeans_plan import plan as plan_clustering
from mlcd.clustering.levels import check_levels
from mlcd.clustering.members import NUM_EXAMPLES
from mlcd.clustering.rows import FileRows, Rows, SelectedRows, UnitRows, lowest_hashed
from mlcd.clustering.seeding import distinct_rows, sampled
from mlcd.clustering.sums import mean_of
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.pipelines.cluster_report import (
    PICTURE,
    REPORT,
    summarize_clusters,
    write_coarser,
    write_report,
)
from mlcd.pipelines.seen_members import SeenMembers
from mlcd.progress import Meter, Reporter
from mlcd.world import World

CHECKPOINT: Final = ".checkpoint.npz"
_ITERATIONS, _ITERATIONS_OF_MANY = 25, 3
# Version of the start, the objective and the stop rule. A checkpoint of another is not used, so an
# upgrade of mlcd during a run does not change the centers.
_STOP_RULE: Final = 3
# first counter of the hash; differs from that of the initial centers
_AUDITED_STREAM: Final = 2
_SINGLE_PROCESS: Final = World()
# From the ids of the rows to cluster (None for all) and the mean to subtract (None for none).
FindMembers: TypeAlias = Callable[
    [NDArray[np.int64] | None, NDArray[np.float32] | None], MemberSums
]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options that determine the centers.

    names: name each center by the majority of its members' known classes, for display only.
    iterations: upper limit; None for 25, or 3 above 16,384 clusters.
    hold_out: share of each class left out, as in training and evaluation. sample: number of rows
    per cluster to draw by hash and cluster; None for all. subtract_mean: subtract the mean of the
    rows, which the centers store. examples: number of nearest members per center whose keys the
    centers store. levels: decreasing numbers of clusters of the coarser levels. chosen_of:
    separation at each number of clusters that was compared to choose `num_clusters`. balanced:
    limit each cluster to `largest` rows, by default to a quarter more than the mean.
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
    balanced: bool = False
    largest: int | None = None

    @property
    def num_iterations(self) -> int:
        """Returns the maximum number of iterations: `iterations`, or a default."""
        if self.iterations is not None:
            return self.iterations
        return _ITERATIONS if self.num_clusters <= MANY_CLUSTERS else _ITERATIONS_OF_MANY

    def identity(self) -> dict[str, Any]:
        """Returns the options for the manifest; options added in later versions appear only if they
        differ from their defaults.
        """
        options = asdict(self) | {"iterations": self.num_iterations, "levels": list(self.levels)}
        options["chosen_of"] = [candidate.clusters for candidate in self.chosen_of]
        defaults: dict[str, Any] = {
            "sample": None,
            "report": False,
            "examples": NUM_EXAMPLES,
            "levels": [],
            "chosen_of": [],
            "balanced": False,
            "largest": None,
        }
        return {
            name: value
            for name, value in options.items()
            if name not in defaults or value != defaults[name]
        }


def cluster(
    embeddings: EmbeddingsArtifact,
    out: Path,
    options: ClusterOptions,
    *,
    reporter: Reporter,
    world: World = _SINGLE_PROCESS,
    find_members: FindMembers | None = None,
) -> Artifact:
    """Runs spherical k-means on the rows that are not held out; rank 0 writes the artifact.

    Every iteration writes a checkpoint to the draft: a call that was killed can be repeated and
    gives the same bytes. find_members: creates an object that assigns rows to centers elsewhere;
    None assigns them in this process.
    """
    request, finished = _make_request(embeddings, out, options, world)
    if finished is not None:
        return finished
    rows, row_ids = _select(embeddings, _select_training_rows(embeddings, options), options)
    size_limit = _find_size_limit(rows, options)
    with Draft(out, request) if world.rank == 0 else nullcontext() as draft:
        for part in range(world.rank, embeddings.num_parts, world.size):
            verify_file(embeddings.artifact, part_name(part))
        mean = _compute_mean(rows, world) if options.subtract_mean else None
        unit = UnitRows(rows, mean)
        members = find_members(row_ids, mean) if find_members else None
        result = _run_kmeans(unit, options, draft, members, reporter=reporter, world=world)
        if size_limit:
            result = _apply_size_limit(unit, result, size_limit, options.seed, reporter)
        assignment = _gather_assignment(result.assignment, rows.num_rows, world)
        seen_members = SeenMembers.of(unit, result, options.examples, world)
        if draft:
            classes = _select_names(embeddings.class_names, row_ids)
            Centers(
                vectors=result.centers,
                sizes=result.sizes,
                fingerprint=embeddings.fingerprint,
                names=majority_names(assignment, classes, options.num_clusters)
                if options.names
                else None,
                mean=mean,
                examples=seen_members.examples(embeddings, row_ids) if options.examples else None,
                audit_rows=_draw_audit_rows(embeddings, row_ids)
                if options.num_clusters >= MIN_CENTERS
                else None,
                quantiles=seen_members.quantiles(result, assignment),
            ).write(draft)
            summary = summarize_clusters(result, assignment, classes)
            if size_limit:
                # the last objective is of the bounded clusters, the one before of k-means
                summary |= {"bound": size_limit, "objective_unbounded": result.objective[-2]}
                write_members(draft, embeddings, row_ids, assignment)
            if options.chosen_of:
                summary["chosen_of"] = [asdict(candidate) for candidate in options.chosen_of]
            if options.levels:
                summary["levels"] = write_coarser(draft, result, options.levels, options.seed)
            summary["held_out"] = (
                int(embeddings.held_out(options.hold_out).sum()) if options.hold_out else 0
            )
            if options.report:
                summary |= write_report(draft, result, assignment, classes)
            draft.publish(summary=summary, logs=(REPORT, PICTURE))
    world.broadcast(None)  # a barrier: the artifact exists afterwards
    published = find_published(out, request)
    assert published is not None
    return published


def _make_request(
    embeddings: EmbeddingsArtifact, out: Path, options: ClusterOptions, world: World
) -> tuple[Request, Artifact | None]:
    """Returns (the request, its finished artifact or None).

    Raises InvalidInput or ConfigInvalid for unusable options, Conflict if `out` is something else.
    """
    check_levels((options.num_clusters, *options.levels))
    if options.balanced and world.size > 1:
        raise ConfigInvalid(
            "balanced clusters need a single process", remedy="start it without torchrun"
        )
    request = Request(
        "centers",
        options.identity(),
        (embeddings.artifact.as_parent_of(out, "embeddings"),),
        embeddings.fingerprint,
    )
    return request, find_published(out, request)


def choose_number(
    embeddings: EmbeddingsArtifact, options: ClusterOptions, nums: Sequence[int]
) -> ClusterOptions:
    """Returns the options with the number of `nums` whose clusters separate unseen rows best."""
    smallest = replace(options, num_clusters=min(nums), sample=None)
    rows, _ = _select(embeddings, _select_training_rows(embeddings, smallest), smallest)
    mean = _compute_mean(rows, _SINGLE_PROCESS) if options.subtract_mean else None
    scored_numbers = candidates(UnitRows(rows, mean), nums, seed=options.seed)
    return replace(options, num_clusters=best(scored_numbers), chosen_of=scored_numbers)


def plan(
    embeddings: EmbeddingsArtifact,
    out: Path,
    options: ClusterOptions,
    *,
    world: World = _SINGLE_PROCESS,
) -> Plan:
    """Returns the cost of `cluster` with the same arguments, and writes nothing.

    Raises the errors of `cluster` that need no pass over all rows.
    """
    _make_request(embeddings, out, options, world)
    rows, _ = _select(embeddings, _select_training_rows(embeddings, options), options)
    _find_size_limit(rows, options)
    if options.num_clusters <= MANY_CLUSTERS:  # drawing more initial centers would take too long
        distinct_rows(UnitRows(rows), options.num_clusters, options.seed)
    return plan_clustering(
        rows.num_rows,
        options.num_clusters,
        rows.dimension,
        iterations=options.num_iterations + (TURNS if options.balanced else 0),
        processes=world.size,
        row_bytes=BOUNDED_ROW_BYTES if options.balanced else CENTER_BYTES,
    )


def rows_to_cluster(
    embeddings: EmbeddingsArtifact, options: ClusterOptions
) -> NDArray[np.int64] | None:
    """Returns the ids of the rows that `cluster` uses with the same arguments; None for all."""
    return _select(embeddings, _select_training_rows(embeddings, options), options)[1]


class KeyedRows(FileRows):
    """The rows of an artifact; error messages name a row by its key."""

    def __init__(self, embeddings: EmbeddingsArtifact) -> None:
        super().__init__(
            [embeddings.artifact.file(part_name(part)) for part in range(embeddings.num_parts)]
        )
        self._embeddings = embeddings

    def describe(self, row: int) -> str:
        return f"embeddings row {row} ({self._embeddings.keys[row]})"


def _select_training_rows(
    embeddings: EmbeddingsArtifact, options: ClusterOptions
) -> NDArray[np.int64] | None:
    """Returns the ids of the rows that are not held out; None for all."""
    is_used = ~embeddings.held_out(options.hold_out) if options.hold_out else None
    num_used = embeddings.num_rows if is_used is None else int(is_used.sum())
    if options.num_clusters > num_used:
        raise InvalidInput(
            f"{options.num_clusters} clusters need at least as many embeddings, got {num_used}",
            remedy=f"request at most {num_used} clusters, or hold out less than"
            f" {options.hold_out:g} of the rows"
            if num_used
            else "embed more images, or hold out fewer",
        )
    return None if is_used is None else np.flatnonzero(is_used)


def _select(
    embeddings: EmbeddingsArtifact, row_ids: NDArray[np.int64] | None, options: ClusterOptions
) -> tuple[Rows, NDArray[np.int64] | None]:
    """Returns (the rows to cluster, their ids in the artifact or None for all)."""
    rows: Rows = KeyedRows(embeddings)
    if row_ids is not None:
        rows = SelectedRows(rows, row_ids)
    if options.sample is None:
        return rows, row_ids
    sample = sampled(rows, options.sample * options.num_clusters, options.seed)
    if sample is rows:
        return rows, row_ids
    assert isinstance(sample, SelectedRows)
    return sample, sample.selected if row_ids is None else row_ids[sample.selected]


def _find_size_limit(rows: Rows, options: ClusterOptions) -> int | None:
    """Returns the maximum number of rows per cluster; None for no limit."""
    if not options.balanced:
        return None
    return checked_bound(rows.num_rows, options.num_clusters, options.largest)


def _select_names(names: list[str | None], row_ids: NDArray[np.int64] | None) -> list[str | None]:
    return names if row_ids is None else [names[row] for row in row_ids]


def _run_kmeans(
    rows: UnitRows,
    options: ClusterOptions,
    draft: Draft | None,
    members: MemberSums | None,
    *,
    reporter: Reporter,
    world: World,
) -> KMeansResult:
    """Runs k-means, starting from the checkpoint in the draft if there is one."""
    start = world.broadcast(_read_state(draft) if draft else None)
    done = start.iteration if start else 0
    with reporter.stage("cluster", options.num_iterations + 1, done=done) as meter:
        return kmeans(
            rows,
            options.num_clusters,
            iterations=options.num_iterations,
            seed=options.seed,
            start=start,
            world=world,
            members=members,
            on_start=lambda state: _save_state(draft, state) if draft else None,
            on_iteration=lambda progress: _report_progress(meter, progress),
        )


def _apply_size_limit(
    rows: UnitRows, result: KMeansResult, size_limit: int, seed: int, reporter: Reporter
) -> KMeansResult:
    with reporter.stage("balance", TURNS) as meter:
        return bound_sizes(
            rows,
            result,
            size_limit,
            seed=seed,
            on_turn=lambda reached: meter.advance(1, objective=reached),
        )


def _compute_mean(rows: Rows, world: World) -> NDArray[np.float32]:
    mean = mean_of(UnitRows(rows), world)
    if all(np.allclose(block, mean, atol=1e-6) for _, block in rows.blocks(0, rows.num_rows)):
        raise InvalidInput(
            "clustering needs different images, got images with equal embeddings",
            remedy="give different images",
        )
    return mean


def _save_state(draft: Draft, state: State) -> None:
    with draft.write(CHECKPOINT) as path, path.open("wb") as file:
        np.savez(
            file,
            centers=state.centers,
            counts=np.array([state.iteration, state.repaired, state.num_splits]),
            objective=np.array(state.objective, dtype=np.float64),
            stop_rule=np.array(_STOP_RULE),
            request=np.array(_format_request(draft)),
        )


def _read_state(draft: Draft) -> State | None:
    """Returns the state that an earlier attempt saved; None without a checkpoint, or if the
    checkpoint is damaged or has other input or settings.
    """
    if not draft.has(CHECKPOINT):
        return None
    try:
        # We open the file: np.load does not close a file that it opened and cannot read.
        with (
            (draft.path / CHECKPOINT).open("rb") as file,
            np.load(file, allow_pickle=False) as saved,
        ):
            if str(saved["request"]) != _format_request(draft) or saved["stop_rule"] != _STOP_RULE:
                return None
            iteration, repaired, num_splits = (int(count) for count in saved["counts"])
            history = tuple(float(value) for value in saved["objective"])
            return State(saved["centers"], iteration, history, repaired, num_splits)
    except (OSError, ValueError, KeyError, BadZipFile):
        return None  # the run starts again and gives the same centers


def _format_request(draft: Draft) -> str:
    return json.dumps(draft.request.identity(), sort_keys=True)


def _report_progress(meter: Meter, progress: Progress) -> None:
    meter.advance(
        1,
        objective=progress.objective,
        imbalance=progress.imbalance,
        moved=progress.moved,
        rows_per_s=progress.rows_per_s,
    )


def _gather_assignment(own: NDArray[np.int32], num_rows: int, world: World) -> NDArray[np.int32]:
    if world.size == 1:
        return own
    assignment = np.zeros(num_rows, dtype=np.int32)
    assignment[slice(*world.own_rows(num_rows))] = own
    return world.sum_integers(assignment)


def _draw_audit_rows(
    embeddings: EmbeddingsArtifact, row_ids: NDArray[np.int64] | None
) -> NDArray[np.float16]:
    """Returns rows that were not clustered, [n, D], drawn by hash; from all rows if too few were
    left out. The mean is not subtracted.
    """
    if row_ids is not None and embeddings.num_rows - len(row_ids) >= MIN_AUDITED_ROWS:
        held_out = np.delete(np.arange(embeddings.num_rows), row_ids)
        sample = held_out[lowest_hashed(len(held_out), AUDITED_ROWS, _AUDITED_STREAM)]
    else:
        sample = lowest_hashed(embeddings.num_rows, AUDITED_ROWS, _AUDITED_STREAM)
    return UnitRows(KeyedRows(embeddings)).read(np.sort(sample)).astype(np.float16)
