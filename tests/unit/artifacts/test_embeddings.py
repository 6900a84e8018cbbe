import numpy as np
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact, keys_name, part_name
from mlcd.errors import ArtifactInvalid
from tests.written_artifacts import write_embeddings


def write(out, num_rows, num_keys):
    parts = [np.eye(4, dtype=np.float32)[:num] for num in num_rows]
    keys = [f"{part}/{row}" for part, num in enumerate(num_keys) for row in range(num)]
    return write_embeddings(out, parts, keys)


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
