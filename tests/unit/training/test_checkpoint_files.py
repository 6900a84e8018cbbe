"""Checkpoint files on one process; several are in test_partial_fc.py and
tests/e2e/test_train.py.
"""

import pytest
import torch

from mlcd.errors import ArtifactInvalid
from mlcd.training.checkpoint.files import read_tensor_sizes, read_tensors, write_tensors


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "trunk.b": torch.randn((3, 5), generator=generator, dtype=torch.float64),
        "centers.weight": torch.randn((7, 4), generator=generator).bfloat16(),
        "centers.row_steps": torch.arange(7),
        "moments.b.step": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    tensors = some_tensors()
    write_tensors(tensors, tmp_path / "state", None)
    stored = read_tensor_sizes(tmp_path / "state")
    assert stored == {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    found = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored.items()}
    read_tensors(found, tmp_path / "state", alone=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_bytes_depend_on_the_content_alone(tmp_path):
    """The order in which safetensors writes a header's remarks is random: of 12 writes, two would
    differ.
    """
    written = set()
    for attempt in range(12):
        tensors = dict(sorted(some_tensors().items(), reverse=bool(attempt % 2)))
        write_tensors(tensors, tmp_path / str(attempt), None)
        (path,) = (tmp_path / str(attempt)).iterdir()
        written.add(path.read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b'\x10\0\0\0\0\0\0\0{"a": [1, 2, 3]}'])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, damage):
    write_tensors(some_tensors(), tmp_path / "state", None)
    (path,) = (tmp_path / "state").iterdir()
    path.write_bytes(damage)
    with pytest.raises(ArtifactInvalid, match="state cannot be read"):
        read_tensor_sizes(tmp_path / "state")


def test_a_file_that_ends_too_soon_is_refused_in_one_line(tmp_path):
    tensors = some_tensors()
    write_tensors(tensors, tmp_path / "state", None)
    (path,) = (tmp_path / "state").iterdir()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ArtifactInvalid, match="state cannot be read"):
        read_tensors(tensors, tmp_path / "state", alone=True)


def test_a_full_disk_is_what_is_raised(tmp_path):
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(OSError, match="state"):
        write_tensors(some_tensors(), tmp_path / "state", None)
