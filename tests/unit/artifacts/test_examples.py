import numpy as np
import pyarrow as pa
import pytest

from mlcd.artifacts.examples import EXAMPLES, CenterExample, Examples
from mlcd.errors import ArtifactInvalid


def written(path, counts, *, similarities=True):
    num = int(sum(counts))
    keys = pa.array([f"klasse/{number}-ü" for number in range(num)], pa.large_string())
    scores = np.linspace(1, -1, num, dtype=np.float32) if similarities else None
    Examples.of(keys, np.array(counts), scores).write(path)
    return Examples.open(path)


def test_each_center_has_its_own_in_order(tmp_path):
    counts = [2, 0, 3] * 3000  # several batches
    examples = written(tmp_path / EXAMPLES, counts)
    assert len(examples) == len(counts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    for center in (0, 1, 2, 4095, 4096, 4097, len(counts) - 1):
        keys = [f"klasse/{number}-ü" for number in range(starts[center], starts[center + 1])]
        assert [example.key for example in examples.of_center(center)] == keys
    assert examples.of_center(2, 1) == examples.of_center(2)[:1]
    first = examples.of_center(0)[0]
    assert first == CenterExample("klasse/0-ü", 1.0)


def test_where_no_similarity_was_measured_there_is_none(tmp_path):
    examples = written(tmp_path / EXAMPLES, [1, 2], similarities=False)
    assert [example.similarity for example in examples.of_center(1)] == [None, None]


def test_they_are_not_in_memory_until_they_are_asked_for(tmp_path):
    written(tmp_path / EXAMPLES, [8] * 100_000)
    before = pa.total_allocated_bytes()
    examples = Examples.open(tmp_path / EXAMPLES)
    assert examples.of_center(99_999)[-1].key == "klasse/799999-ü"
    assert pa.total_allocated_bytes() - before < 100_000  # of 15 MB
    assert (tmp_path / EXAMPLES).stat().st_size > 10_000_000


def test_another_file_is_refused(tmp_path):
    (tmp_path / EXAMPLES).write_bytes(b"ARROW1\0\0 not at all")
    with pytest.raises(ArtifactInvalid, match="cannot be read"):
        Examples.open(tmp_path / EXAMPLES)
    table = pa.table({"keys": ["a"]})
    with (
        pa.OSFile(str(tmp_path / EXAMPLES), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    with pytest.raises(ArtifactInvalid, match="must hold examples"):
        Examples.open(tmp_path / EXAMPLES)
