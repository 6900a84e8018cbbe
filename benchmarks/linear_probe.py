"""The linear probe's solver against scikit-learn's, on the same features in one run, interleaved.

    python benchmarks/linear_probe.py [--c 0.01 1 100] [--runs 3] [--embeddings DIR] [--threads N]

Contenders, all from zero, all for the objective of sklearn.linear_model.LogisticRegression:
  ours           training.evaluation.logistic_regression
  lbfgs          scikit-learn as CLIP's protocol calls it: max_iter 1000, everything else by default
  lbfgs to gap   scikit-learn's L-BFGS with tol=1e-8 and max_iter 100,000, as far as its line search goes
Prints the median time (least to most) and how far each objective is above the lowest of the three. The features are
those of an embeddings artifact with classes, or scikit-learn's digits and breast cancer (standardized).
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression as Peer
from threadpoolctl import threadpool_limits

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from training.evaluation.logistic_regression import LogisticRegression, PrincipalRows

Rows = tuple[NDArray[np.float64], NDArray[np.int64]]


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    with threadpool_limits(options.threads), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # scikit-learn tells that it has not converged; the objective shows it
        for name, (features, classes) in read_data(options.embeddings).items():
            shape = f"{features.shape[0]} rows of {features.shape[1]}, {classes.max() + 1} classes"
            print(f"{name}: {shape}, {options.threads} threads")
            for c in options.c:
                compare(features, classes, c, options.runs)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--c", type=float, nargs="+", default=[1e-2, 1.0, 100.0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--embeddings", type=Path, help="An embeddings artifact of images in class folders."
    )
    return parser.parse_args()


def read_data(embeddings: Path | None) -> dict[str, Rows]:
    if embeddings is not None:
        stored = EmbeddingsArtifact.open(embeddings)
        _, classes = np.unique(np.array(stored.class_names, dtype=str), return_inverse=True)
        return {embeddings.name: (stored.load().astype(np.float64), classes.astype(np.int64))}
    features, classes = load_breast_cancer(return_X_y=True)
    standardized = (features - features.mean(axis=0)) / features.std(axis=0)
    digits, numbers = load_digits(return_X_y=True)
    return {"digits": (digits, numbers), "breast cancer": (standardized, classes)}


def compare(features: NDArray[np.float64], classes: NDArray[np.int64], c: float, runs: int) -> None:
    contenders: dict[str, Callable[[], float]] = {
        "ours": lambda: ours(features, classes, c),
        "lbfgs": lambda: theirs(features, classes, Peer(C=c, max_iter=1000)),
        "lbfgs to gap": lambda: theirs(features, classes, Peer(C=c, max_iter=100_000, tol=1e-8)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    objectives: dict[str, float] = {}
    for _ in range(runs):
        for name, work in contenders.items():
            started = time.perf_counter()
            objectives[name] = work()
            seconds[name].append(time.perf_counter() - started)
    lowest = min(objectives.values())
    for name, times in seconds.items():
        spread = f"{statistics.median(times):8.3f} s ({min(times):.3f} to {max(times):.3f})"
        print(
            f"  C {c:<8g} {name:13} {spread}  objective {objectives[name] / lowest - 1:.1e} above the lowest"
        )


def ours(features: NDArray[np.float64], classes: NDArray[np.int64], c: float) -> float:
    rows, labels = torch.from_numpy(features), torch.from_numpy(classes)
    return LogisticRegression(PrincipalRows(rows), labels, int(classes.max()) + 1).fit(c).objective


def theirs(features: NDArray[np.float64], classes: NDArray[np.int64], peer: Peer) -> float:
    """The objective of scikit-learn's solution, written out."""
    peer.fit(features, classes)
    logits = features @ peer.coef_.T + peer.intercept_
    if logits.shape[1] == 1:
        logits = np.hstack([np.zeros_like(logits), logits])
    losses = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(classes)), classes]
    return float(peer.C * losses.sum() + (peer.coef_**2).sum() / 2)


if __name__ == "__main__":
    main()
