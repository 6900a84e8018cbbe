"""Embeddings to the Centers artifact: streamed, by one process or several, resumable after every
iteration.
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
# Version of the objective and of the rule that ends the iterations; a checkpoint of another one is
# not used, so that an update of mlcd midway gives the same centers.
_STOP_RULE: Final = 2
# first counter of the hash, so that the audited rows are not the first centers
_AUDITED_STREAM: Final = 2
_ALONE: Final = World()
# From the numbers of the clustered rows (None for all) and their mean (None for none).
FindMembers: TypeAlias = Callable[
    [NDArray[np.int64] | None, NDArray[np.float32] | None], MemberSums
]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options that decide the centers.

    names: name each center by the majority of its members' known classes, for people only.
    iterations: at most; None for 25, or 3 after a two-level start (above 16,384 clusters).
    hold_out: share of each class left out, as in training and evaluation. sample: cluster only so
    many rows for each cluster, drawn by hash. subtract_mean: compare rows after subtracting their
    mean, which becomes part of the centers. examples: the keys of so many nearest members of each
    center become part of them. levels: the numbers of clusters of coarser levels, ever smaller.
    chosen_of: the curve of the numbers that `num_clusters` was chosen of. balanced: no cluster
    holds more rows than `largest`, or a quarter more than the mean.
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
            "balanced": False,
            "largest": None,
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
    find_members: FindMembers | None = None,
) -> Artifact:
    """Runs spherical k-means on the rows that are not held out; the first process writes.

    Every iteration leaves a checkpoint in the draft: killed at any moment, the same call ends with
    the same bytes. find_members: makes what finds the members of centers in place of this process.
    """
    request, done = _request(embeddings, out, options, world)
    if done is not None:
        return done
    rows, numbers = _select(embeddings, _not_held_out(embeddings, options), options)
    bound = _bound(rows, options)
    with Draft(out, request) if world.rank == 0 else nullcontext() as draft:
        for part in range(world.rank, embeddings.num_parts, world.size):
            verify_file(embeddings.artifact, part_name(part))
        mean = _find_mean(rows, world) if options.subtract_mean else None
        unit = UnitRows(rows, mean)
        members = find_members(numbers, mean) if find_members else None
        result = _run_kmeans(unit, options, draft, members, reporter=reporter, world=world)
        if bound:
            result = _limit_sizes(unit, result, bound, options.seed, reporter)
        assignment = _gather(result.assignment, rows.num_rows, world)
        seen_members = SeenMembers.of(unit, result, options.examples, world)
        if draft:
            classes = _pick(embeddings.class_names, numbers)
            Centers(
                vectors=result.centers,
                sizes=result.sizes,
                fingerprint=embeddings.fingerprint,
                names=majority_names(assignment, classes, options.num_clusters)
                if options.names
                else None,
                mean=mean,
                examples=seen_members.examples(embeddings, numbers) if options.examples else None,
                audit_rows=_audit_rows(embeddings, numbers)
                if options.num_clusters >= MIN_CENTERS
                else None,
                quantiles=seen_members.quantiles(result, assignment),
            ).write(draft)
            summary = summarize_clusters(result, assignment, classes)
            if bound:
                # the objective of the bounded clusters follows those of k-means
                summary |= {"bound": bound, "objective_unbounded": result.objective[-2]}
                write_members(draft, embeddings, numbers, assignment)
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
    world.share(None)  # no process looks for the artifact before it exists
    published = find_published(out, request)
    assert published is not None
    return published


def _request(
    embeddings: EmbeddingsArtifact, out: Path, options: ClusterOptions, world: World
) -> tuple[Request, Artifact | None]:
    """Returns (the request, its finished artifact or None). Raises InvalidInput, ConfigInvalid or
    Conflict where there can be none.
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
    """Returns the options with the number of clusters at which unseen rows are best separated."""
    least = replace(options, num_clusters=min(nums), sample=None)
    rows, _ = _select(embeddings, _not_held_out(embeddings, least), least)
    mean = _find_mean(rows, _ALONE) if options.subtract_mean else None
    scored_numbers = candidates(UnitRows(rows, mean), nums, seed=options.seed)
    return replace(options, num_clusters=best(scored_numbers), chosen_of=scored_numbers)


def plan(
    embeddings: EmbeddingsArtifact, out: Path, options: ClusterOptions, *, world: World = _ALONE
) -> Plan:
    """Returns the cost of `cluster` with the same arguments, and writes nothing.

    Raises what `cluster` would raise, but for what a pass over all rows finds.
    """
    _request(embeddings, out, options, world)
    rows, _ = _select(embeddings, _not_held_out(embeddings, options), options)
    _bound(rows, options)
    if options.num_clusters <= MANY_CLUSTERS:  # more first centers would take a while
        distinct_rows(UnitRows(rows), options.num_clusters, options.seed)
    return plan_clustering(
        rows.num_rows,
        options.num_clusters,
        rows.dimension,
        iterations=options.passes + (TURNS if options.balanced else 0),
        processes=world.size,
        row_bytes=BOUNDED_ROW_BYTES if options.balanced else CENTER_BYTES,
    )


def rows_to_cluster(
    embeddings: EmbeddingsArtifact, options: ClusterOptions
) -> NDArray[np.int64] | None:
    """Returns the numbers of the rows that `cluster` uses with the same arguments; None for all."""
    return _select(embeddings, _not_held_out(embeddings, options), options)[1]


class KeyedRows(FileRows):
    """The rows of an artifact; errors name them by their keys."""

    def __init__(self, embeddings: EmbeddingsArtifact) -> None:
        super().__init__(
            [embeddings.artifact.file(part_name(part)) for part in range(embeddings.num_parts)]
        )
        self._embeddings = embeddings

    def describe(self, row: int) -> str:
        return f"embeddings row {row} ({self._embeddings.keys[row]})"


def _not_held_out(
    embeddings: EmbeddingsArtifact, options: ClusterOptions
) -> NDArray[np.int64] | None:
    """Returns the numbers of the rows that are not held out; None for all."""
    is_kept = ~embeddings.held_out(options.hold_out) if options.hold_out else None
    num_kept = embeddings.num_rows if is_kept is None else int(is_kept.sum())
    if options.num_clusters > num_kept:
        raise InvalidInput(
            f"{options.num_clusters} clusters were asked of {num_kept} embeddings",
            remedy=f"ask for at most {num_kept} clusters, or hold out fewer than"
            f" {options.hold_out:g} of the rows"
            if num_kept
            else "embed more images, or hold out fewer",
        )
    return None if is_kept is None else np.flatnonzero(is_kept)


def _select(
    embeddings: EmbeddingsArtifact, numbers: NDArray[np.int64] | None, options: ClusterOptions
) -> tuple[Rows, NDArray[np.int64] | None]:
    """Returns (the rows to cluster, their numbers in the artifact or None for all)."""
    rows: Rows = KeyedRows(embeddings)
    if numbers is not None:
        rows = SelectedRows(rows, numbers)
    if options.sample is None:
        return rows, numbers
    drawn = sampled(rows, options.sample * options.num_clusters, options.seed)
    if drawn is rows:
        return rows, numbers
    assert isinstance(drawn, SelectedRows)
    return drawn, drawn.selected if numbers is None else numbers[drawn.selected]


def _bound(rows: Rows, options: ClusterOptions) -> int | None:
    """Returns the largest number of rows of a cluster; None for any."""
    if not options.balanced:
        return None
    return checked_bound(rows.num_rows, options.num_clusters, options.largest)


def _pick(names: list[str | None], numbers: NDArray[np.int64] | None) -> list[str | None]:
    return names if numbers is None else [names[row] for row in numbers]


def _run_kmeans(
    rows: UnitRows,
    options: ClusterOptions,
    draft: Draft | None,
    members: MemberSums | None,
    *,
    reporter: Reporter,
    world: World,
) -> KMeansResult:
    """Runs k-means from the checkpoint in the draft on, where there is one."""
    start = world.share(_read_state(draft) if draft else None)
    done = start.iteration if start else 0
    with reporter.stage("cluster", options.passes + 1, done=done) as meter:
        return kmeans(
            rows,
            options.num_clusters,
            iterations=options.passes,
            seed=options.seed,
            start=start,
            world=world,
            members=members,
            on_start=lambda state: _save_state(draft, state) if draft else None,
            on_iteration=lambda progress: _show(meter, progress),
        )


def _limit_sizes(
    rows: UnitRows, result: KMeansResult, bound: int, seed: int, reporter: Reporter
) -> KMeansResult:
    with reporter.stage("balance", TURNS) as meter:
        return bound_sizes(
            rows,
            result,
            bound,
            seed=seed,
            on_turn=lambda reached: meter.advance(1, objective=reached),
        )


def _find_mean(rows: Rows, world: World) -> NDArray[np.float32]:
    mean = mean_of(UnitRows(rows), world)
    if all(np.allclose(block, mean, atol=1e-6) for _, block in rows.blocks(0, rows.num_rows)):
        raise InvalidInput(
            "clustering needs different images, got images that are all alike",
            remedy="give different ones",
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
            request=np.array(_request_text(draft)),
        )


def _read_state(draft: Draft) -> State | None:
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
            if str(saved["request"]) != _request_text(draft) or saved["stop_rule"] != _STOP_RULE:
                return None
            iteration, repaired, num_splits = (int(count) for count in saved["counts"])
            history = tuple(float(value) for value in saved["objective"])
            return State(saved["centers"], iteration, history, repaired, num_splits)
    except (
        OSError,
        ValueError,
        KeyError,
        BadZipFile,
    ):  # a damaged checkpoint: the run starts again and gives the same centers
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


def _gather(own: NDArray[np.int32], num_rows: int, world: World) -> NDArray[np.int32]:
    if world.size == 1:
        return own
    every = np.zeros(num_rows, dtype=np.int32)
    every[slice(*world.own_rows(num_rows))] = own
    return world.sum_integers(every)


def _audit_rows(
    embeddings: EmbeddingsArtifact, numbers: NDArray[np.int64] | None
) -> NDArray[np.float16]:
    """Returns rows that were not clustered, drawn by hash; where those are too few, any rows.

    The result is [n, D] as the model gives the rows.
    """
    if numbers is not None and embeddings.num_rows - len(numbers) >= MIN_AUDITED_ROWS:
        held_out = np.delete(np.arange(embeddings.num_rows), numbers)
        drawn = held_out[lowest_hashed(len(held_out), AUDITED_ROWS, _AUDITED_STREAM)]
    else:
        drawn = lowest_hashed(embeddings.num_rows, AUDITED_ROWS, _AUDITED_STREAM)
    return UnitRows(KeyedRows(embeddings)).read(np.sort(drawn)).astype(np.float16)
