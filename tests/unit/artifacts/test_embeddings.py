import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import KEY_SCHEMA, EmbeddingsArtifact, keys_name, part_name
from mlcd.artifacts.manifest import Request
from mlcd.errors import ArtifactInvalid


def write(out, num_rows, num_keys):
    with Draft(out, Request("embeddings", {}, (), "f" * 64)) as draft:
        for part in range(2):
            with draft.write(part_name(part)) as path, path.open("wb") as file:
                np.save(file, np.eye(4, dtype=np.float32)[: num_rows[part]])
            keys = [
                {"key": f"{part}/{row}", "class_name": None, "sha256": bytes(32), "split": 0.5}
                for row in range(num_keys[part])
            ]
            with draft.write(keys_name(part)) as path:
                pq.write_table(pa.Table.from_pylist(keys, schema=KEY_SCHEMA), path)
        draft.publish()
    return out


@pytest.mark.parametrize("name", [part_name(1), keys_name(1)])
def test_a_damaged_file_is_named_before_it_is_read(tmp_path, name):
    path = write(tmp_path / "damaged", (3, 2), (3, 2)) / name
    data = bytearray(path.read_bytes())
    place = 0 if name == part_name(1) else len(data) - 1
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactInvalid, match=r"part-00001\.npy or its keys are damaged: embed"):
        EmbeddingsArtifact.open(path.parent)


def test_rows_without_keys_are_refused(tmp_path):
    assert EmbeddingsArtifact.open(write(tmp_path / "sound", (3, 2), (3, 2))).num_rows == 5
    with pytest.raises(ArtifactInvalid, match=r"part-00001\.npy has 2 rows and 3 keys"):
        EmbeddingsArtifact.open(write(tmp_path / "other", (3, 2), (3, 3)))


def test_rows_are_read_in_any_order_from_all_parts(tmp_path):
    embeddings = EmbeddingsArtifact.open(write(tmp_path / "e", (3, 4), (3, 4)))
    wanted = np.array([6, 0, 3, 3, 2, 5])
    np.testing.assert_array_equal(embeddings.rows_at(wanted), embeddings.load()[wanted])
