"""Example images of each class: the samples with the highest scores for which it is the first
label.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.artifacts.disk import replacing
from mlcd.artifacts.examples import EXAMPLES, Examples
from mlcd.clustering.members import NearestMembers
from mlcd.training.data.dataset import Dataset


def write_examples(dataset: Dataset, run: Path) -> None:
    """Makes `run`/examples.arrow, which every checkpoint's centers copy, unless it exists."""
    path = run / EXAMPLES
    if not path.is_file():
        with replacing(path) as temporary:
            class_examples(dataset).write(temporary)


def class_examples(dataset: Dataset) -> Examples:
    """Returns the keys of at most 8 training samples for each class.

    Similarities are left out: scores are cosines with the centers that were clustered, and training
    moves these.
    """
    nearest = NearestMembers(dataset.num_centers)
    starts = [0]
    for table in dataset.label_tables:
        starts.append(starts[-1])
        for ids, scores in table.first_labels():
            nearest.add(ids, scores, starts[-1] + np.arange(len(ids)))
            starts[-1] += len(ids)
    classes, columns = np.nonzero(nearest.rows >= 0)
    keys, trained = _samples(dataset, nearest.rows[classes, columns], starts)
    return Examples.of(
        keys.filter(pa.array(trained)),
        np.bincount(classes[trained], minlength=len(nearest.rows)),
        None,
    )


def _samples(
    dataset: Dataset, rows: NDArray[np.int64], starts: list[int]
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns (keys, a mask of those that are trained on) of labeled rows.

    Rows are numbered over all tables. starts: the first row of each table, and the end.
    """
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], starts)
    keys, trained = [pa.array([], pa.large_string())], []
    for number, (part, table) in enumerate(zip(dataset.parts, dataset.label_tables, strict=True)):
        own = rows[order[bounds[number] : bounds[number + 1]]] - starts[number]
        labeled = table.read_keys().take(pa.array(own))
        keys.extend(labeled.chunks)
        trained.append(part.entries.find(labeled) >= 0)
    back = np.argsort(order, kind="stable")
    return pa.concat_arrays(keys).take(pa.array(back)), np.concatenate(trained)[back]
