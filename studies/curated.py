"""The study of selections: towers trained on raw, deduplicated and balanced ones of one size.

    python -m studies.curated --images 'shards/*.tar' --judged DIR --out DIR [--num 2000]

For each of 4 seeds (--seeds) the classes of the images are thinned to a long tail (the largest
keeps 20 times what the smallest keeps). 200 clusters of what is left give the labels, 8 of each
image. Of the same pool three selections of --num images are drawn:

  raw           by hash
  deduplicated  by hash, after all but one of each group of near duplicates (cosine 0.8) are gone
  balanced      of the same, evenly over the clusters

The same small tower learns from each (`data.selection`), and is judged by 5 nearest neighbors among
the classes of --judged, which it never saw. Without --embeddings the starter embeds the images.
Each row of rows.jsonl is one run; what is there is kept, so the same call goes on where it was.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import MANIFEST, Request
from mlcd.artifacts.selection import DECISIONS
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_with_distances
from mlcd.clustering.sampling import balanced
from mlcd.collections.duplicates import duplicate_groups
from mlcd.encoders import open_encoder
from mlcd.images.sources import open_source
from mlcd.pipelines.curation.decisions import SURPLUS, Decisions
from mlcd.pipelines.embed import embed
from mlcd.pipelines.label import LabelOptions, label
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter
from mlcd.randomness import hash_counters
from mlcd.training.config import validate_config
from mlcd.training.run.run_training import run_training
from mlcd.training.telemetry.step_logs import NAME as METRICS
from studies.losses.statistics import paired_difference

SILENT: Final = Reporter("silent")
ARMS: Final = ("raw", "deduplicated", "balanced")
_KNN: Final = "knn"
_CLUSTERS: Final = 200
_TAIL: Final = 20
_DUPLICATES: Final = 0.8
_TOWER: Final = {
    "image_size": 32,
    "patch_size": 8,
    "width": 64,
    "depth": 2,
    "heads": 2,
    "mlp_width": 128,
    "embedding_dim": 64,
}


def main() -> None:
    asked = _asked()
    embeddings = _embeddings(asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["seed"], row["arm"]) for row in rows}
    for seed in range(asked.seeds):
        if all((seed, arm) in done for arm in ARMS):
            continue
        for arm, selected in _selections(embeddings, seed, asked):
            if (seed, arm) not in done:
                rows.append(_row(embeddings, seed, arm, selected, asked))
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    _tell(rows)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True)
    parser.add_argument("--judged", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--embeddings", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=150)
    return parser.parse_args()


def _embeddings(asked: argparse.Namespace) -> EmbeddingsArtifact:
    path: Path = asked.embeddings or asked.out / "embeddings"
    if not (path / MANIFEST).exists():
        with closing(open_encoder(resolve_model("starter", lambda _: None))) as encoder:
            embed(open_source(asked.images), encoder, path, Reporter())
    return EmbeddingsArtifact.open(path)


def _selections(
    embeddings: EmbeddingsArtifact, seed: int, asked: argparse.Namespace
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yields the rows of each arm; the labels of the seed are made before."""
    vectors = embeddings.unit_rows_at(np.arange(embeddings.num_rows))
    pool = _long_tail(embeddings, seed)
    centers = kmeans([vectors[pool]], _CLUSTERS, seed=seed)
    _write_labels(embeddings, centers.centers, centers.sizes, asked.out / f"seed-{seed}")
    drawn = pool[np.argsort(hash_counters(seed, 1, pool), kind="stable")]
    yield "raw", drawn[: asked.num]
    groups = duplicate_groups(
        len(pool), lambda some: vectors[pool[some]], _DUPLICATES, meter=_Silent()
    )
    copies = np.concatenate([pool[group.rows[1:]] for group in groups] or [pool[:0]])
    left = drawn[~np.isin(drawn, copies)]
    yield "deduplicated", left[: asked.num]
    kept = balanced(
        [nearest_with_distances(vectors[left], centers.centers)[0]], asked.num, seed=seed
    )
    yield "balanced", left[kept]


class _Silent:
    """A meter that tells nothing."""

    def advance(self, num: int = 1, **facts: object) -> None: ...


def _long_tail(embeddings: EmbeddingsArtifact, seed: int) -> NDArray[np.int64]:
    """Returns rows, none of them held out, of classes that are thinned to a long tail."""
    generator = np.random.default_rng(seed)
    classes = _classes(embeddings)
    num = int(classes.max()) + 1
    shares = np.geomspace(1, 1 / _TAIL, num)[generator.permutation(num)]
    kept = generator.random(len(classes)) < shares[classes]
    return np.flatnonzero(kept & ~embeddings.held_out(0.2))


def _write_labels(
    embeddings: EmbeddingsArtifact,
    vectors: NDArray[np.float32],
    sizes: NDArray[np.int64],
    folder: Path,
) -> None:
    assert embeddings.fingerprint is not None
    centers = folder / "centers"
    if not (centers / MANIFEST).exists():
        with Draft(centers, Request("centers", fingerprint=embeddings.fingerprint)) as draft:
            Centers(vectors, sizes, embeddings.fingerprint).write(draft)
            draft.publish()
    options = LabelOptions(str(embeddings.artifact.path), str(centers), top=8)
    label(options, folder / "labels", reporter=SILENT)


def _row(
    embeddings: EmbeddingsArtifact,
    seed: int,
    arm: str,
    selected: NDArray[np.int64],
    asked: argparse.Namespace,
) -> dict[str, Any]:
    """Trains on a selection, and returns what is measured."""
    folder = asked.out / f"seed-{seed}"
    _write_selection(embeddings, selected, folder / arm)
    run = folder / f"run-{arm}"
    config = {
        "model": _TOWER,
        "data": {
            "images": asked.images,
            "labels": str(folder / "labels"),
            "selection": str(folder / arm),
        },
        "loss": {"labels_per_image": 8},
        "optim": {"lr": 1e-3, "warmup_steps": 10},
        "schedule": {"steps": asked.steps, "batch_size": 64},
        "checkpoint": {"every_steps": asked.steps},
        "evaluation": {"every_steps": asked.steps, "images": asked.judged},
        "seed": seed,
        "num_threads": 1,
        "out": str(run),
    }
    run_training(validate_config(config), SILENT)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    (judged,) = [line for line in lines if line["step"] == asked.steps and _KNN in line]
    classes = _classes(embeddings)[selected]
    return {
        "seed": seed,
        "arm": arm,
        "images": len(selected),
        "entropy": _entropy(classes),
        "knn": judged[_KNN],
    }


def _write_selection(
    embeddings: EmbeddingsArtifact, selected: NDArray[np.int64], out: Path
) -> None:
    if (out / MANIFEST).exists():
        return
    decisions = Decisions.all_kept(embeddings.num_rows)
    decisions.leave_out(np.setdiff1d(np.arange(embeddings.num_rows), selected), SURPLUS)
    parents = (embeddings.artifact.as_parent_of(out, "embeddings"),)
    with Draft(out, Request("selection", {}, parents, embeddings.fingerprint)) as draft:
        with draft.write(DECISIONS) as path:
            pq.write_table(decisions.table(embeddings), path)
        draft.publish(summary=decisions.facts())


def _classes(embeddings: EmbeddingsArtifact) -> NDArray[np.int64]:
    """Returns the number of each image's class."""
    return np.unique(np.array(embeddings.class_names, dtype=str), return_inverse=True)[1]


def _entropy(classes: NDArray[np.int64]) -> float:
    shares = np.bincount(classes)[np.bincount(classes) > 0] / len(classes)
    return float(-(shares * np.log(shares)).sum())


def _tell(rows: list[dict[str, Any]]) -> None:
    seeds = sorted({row["seed"] for row in rows})
    for measure in ("entropy", "knn"):
        of = {(row["seed"], row["arm"]): row[measure] for row in rows}
        whole = [seed for seed in seeds if all((seed, arm) in of for arm in ARMS)]
        means = {arm: np.mean([of[seed, arm] for seed in whole]) for arm in ARMS}
        print(measure, ", ".join(f"{arm} {mean:.4f}" for arm, mean in means.items()))
        for arm in ARMS[1:] if len(whole) > 1 else ():
            first, second = ({seed: of[seed, each] for seed in whole} for each in (arm, "raw"))
            gain = paired_difference(first, second)
            low, high = gain.mean - gain.half_width, gain.mean + gain.half_width
            print(f"  {arm} - raw: {gain.mean:.4f} ({low:.4f} to {high:.4f}), {gain.n} seeds")


if __name__ == "__main__":
    main()
