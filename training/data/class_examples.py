"""Example images of each class: the best-scored samples among those whose first label it is."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.artifacts.disk import replacing
from mlcd.artifacts.examples import EXAMPLES, Examples
from mlcd.clustering.members import NearestMembers
from mlcd.training.data.dataset import Dataset


def write_examples(dataset: Dataset, run: Path) -> None:
    """Writes `run`/examples.arrow, copied into every checkpoint's centers, unless it exists."""
    path = run / EXAMPLES
    if not path.is_file():
        with replacing(path) as temporary:
            class_examples(dataset).write(temporary)


def class_examples(dataset: Dataset) -> Examples:
    """Returns the keys of at most 8 training samples for each class.

    Similarities are left out: the stored scores are cosines with the clustered centers, which
    training changes.
    """
    nearest = NearestMembers(dataset.num_centers)
    starts = [0]
    for table in dataset.label_tables:
        starts.append(starts[-1])
        for ids, scores in table.first_labels():
            nearest.add(ids, scores, starts[-1] + np.arange(len(ids)))
            starts[-1] += len(ids)
    classes, columns = np.nonzero(nearest.rows >= 0)
    keys, trained = _find_samples(dataset, nearest.rows[classes, columns], starts)
    return Examples.of(
        keys.filter(pa.array(trained)),
        np.bincount(classes[trained], minlength=len(nearest.rows)),
        None,
    )


def _find_samples(
    dataset: Dataset, rows: NDArray[np.int64], starts: list[int]
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns the keys of labeled rows, and a mask of the rows that are trained on.

    rows: indices into the concatenation of all label tables. starts: first row of each table, and
    the total.
    """
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], starts)
    keys, trained = [pa.array([], pa.large_string())], []
    for index, (part, table) in enumerate(zip(dataset.parts, dataset.label_tables, strict=True)):
        table_rows = rows[order[bounds[index] : bounds[index + 1]]] - starts[index]
        labeled = table.read_keys().take(pa.array(table_rows))
        keys.extend(labeled.chunks)
        trained.append(part.entries.find(labeled) >= 0)
    inverse = np.argsort(order, kind="stable")
    return pa.concat_arrays(keys).take(pa.array(inverse)), np.concatenate(trained)[inverse]
