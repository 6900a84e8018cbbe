import numpy as np
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.labels import LabelTable, write_part
from mlcd.artifacts.manifest import Request
from mlcd.clustering.nearest import nearest_centers
from mlcd.types import Neighbors, unit_rows


def test_rows_of_any_length_round_trip(tmp_path):
    ids = np.array([[5, 2, -1], [7, -1, -1], [-1, -1, -1]], dtype=np.int32)
    scores = np.where(ids >= 0, np.float32(0.5), -np.inf).astype(np.float32)
    with Draft(tmp_path / "labels", Request("labels", {"num_centers": 9})) as draft:
        write_part(
            draft, 0, ["a", "b", "c"], [b"1" * 32, b"2" * 32, b"3" * 32], Neighbors(ids, scores)
        )
        write_part(
            draft,
            1,
            ["ü"],
            [b"4" * 32],
            Neighbors(np.array([[16_777_217]], np.int32), np.ones((1, 1), np.float32)),
        )
        draft.publish()
    table = LabelTable.open(tmp_path / "labels")
    assert table.keys == ["a", "b", "c", "ü"]
    assert table.ids.tolist() == [[5, 2], [7, -1], [-1, -1], [16_777_217, -1]]
    assert table.num_centers == 9
    assert table.image_sha256[1] == b"2" * 32
    assert table.names is None
    assert table.row_of_key()["ü"] == 3
    assert table.read_keys().to_pylist() == ["a", "b", "ü"]
    (first, digests), (second, last) = table.iter_ids()
    assert (first.tolist(), second.tolist()) == ([[5, 2], [7, -1]], [[16_777_217]])
    assert [digest.tobytes() for digest in (*digests, *last)] == [b"1" * 32, b"2" * 32, b"4" * 32]


@pytest.fixture
def labeled():
    """Rows and centers at a few known angles, and the labels of a threshold."""
    centers = unit_rows(np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [-1.0, 0.0]]))
    rows = unit_rows(np.array([[1.0, 0.0], [0.5, 0.5], [-1.0, -0.2], [0.0, -1.0]]))
    return rows, centers


def written(path, neighbors):
    with Draft(path, Request("labels", {"num_centers": 4})) as draft:
        num = len(neighbors.ids)
        write_part(draft, 0, [f"k{row}" for row in range(num)], [b"0" * 32] * num, neighbors)
        draft.publish()
    return LabelTable.open(path)


def test_a_threshold_alone_and_with_top_cuts_the_list(labeled, tmp_path):
    rows, centers = labeled
    both = written(tmp_path / "both", nearest_centers(rows, centers, 2, threshold=0.5))
    assert both.ids.tolist() == [[0, 1], [1, 0], [3, -1], [-1, -1]]
    alone = written(tmp_path / "alone", nearest_centers(rows, centers, 4, threshold=0.5))
    assert alone.ids.tolist() == [[0, 1, -1], [1, 0, 2], [3, -1, -1], [-1, -1, -1]]


def test_a_sample_whose_labels_are_all_cut_keeps_its_row(labeled, tmp_path):
    rows, centers = labeled
    table = written(tmp_path / "labels", nearest_centers(rows[3:], centers, 2, threshold=0.5))
    assert table.keys == ["k0"]
    assert table.ids.tolist() == [[-1]]


@pytest.mark.parametrize(
    ("score", "threshold", "ids"),
    [(0.7003, 0.70025, [0]), (0.7001, 0.70015, [-1])],  # both scores are stored as 0.7001953125
)
def test_the_cut_is_made_before_scores_are_rounded(tmp_path, score, threshold, ids):
    rows, centers = (
        unit_rows(np.array([[1.0, 0.0]])),
        unit_rows(np.array([[score, (1 - score**2) ** 0.5]])),
    )
    assert float(np.float16(score)) == 0.7001953125
    assert written(
        tmp_path / "labels", nearest_centers(rows, centers, 1, threshold)
    ).ids.tolist() == [ids]
    scores = pq.read_table(tmp_path / "labels" / "part-00000.parquet").column("scores").to_pylist()
    assert scores == [[0.7001953125][: sum(center >= 0 for center in ids)]]


def test_no_rows_make_a_readable_table(tmp_path):
    empty = Neighbors(np.zeros((0, 8), np.int32), np.zeros((0, 8), np.float32))
    assert written(tmp_path / "labels", empty).ids.shape == (0, 1)
