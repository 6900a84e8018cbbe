"""The archive of a study: photographs byte for byte, larger images at the model's size."""

import io

import numpy as np
import pytest
from PIL import Image

from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from studies.losses.archive import pack_photographs, shrunk, write_zip


def test_large_image_becomes_the_square_that_a_tower_takes(photo):
    small = shrunk(photo, 32)
    assert Image.open(io.BytesIO(small)).size == (32, 32)
    spec = PreprocessSpec(resize_shortest=32, crop=32)
    difference = spec.prepare(small).astype(float) - spec.prepare(photo)
    assert np.abs(difference).mean() < 4  # of 255, by JPEG
    assert shrunk(small, 32) is small


def test_photographs_are_capped_by_class_and_keep_their_bytes(digits, tmp_path):
    path = tmp_path / "digits.zip"
    pack_photographs(str(digits), path, 5)
    source = open_source(str(path))
    names = [entry.class_name for entry in source.entries]
    assert sorted(set(names)) == [str(digit) for digit in range(10)]
    assert all(names.count(name) == 5 for name in set(names))
    for entry in source.entries:
        assert source.read(entry) == (digits / entry.key).read_bytes()


def test_interrupted_zip_is_not_there(tmp_path):
    def files():
        yield "a.png", b"1"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_zip(tmp_path / "images.zip", files())
    assert not (tmp_path / "images.zip").exists()
