import numpy as np

from mlcd.artifact import Draft, Request
from mlcd.labels.table import LabelTable, write_part
from mlcd.types import Neighbors


def test_rows_of_any_length_round_trip(tmp_path):
    ids = np.array([[5, 2, -1], [7, -1, -1], [-1, -1, -1]], dtype=np.int32)
    scores = np.where(ids >= 0, np.float32(0.5), -np.inf).astype(np.float32)
    with Draft(tmp_path / "labels", Request("labels", {"num_centers": 9})) as draft:
        write_part(draft, 0, ["a", "b", "c"], [b"1" * 32, b"2" * 32, b"3" * 32], Neighbors(ids, scores))
        write_part(
            draft, 1, ["ü"], [b"4" * 32], Neighbors(np.array([[16_777_217]], np.int32), np.ones((1, 1), np.float32))
        )
        draft.publish()
    table = LabelTable.open(tmp_path / "labels")
    assert table.keys == ["a", "b", "c", "ü"]
    assert table.ids.tolist() == [[5, 2], [7, -1], [-1, -1], [16_777_217, -1]]
    assert table.num_centers == 9
    assert table.image_sha256[1] == b"2" * 32
    assert table.names is None
    assert table.row_of_key()["ü"] == 3
