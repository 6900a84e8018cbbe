"""The archive of a study is there whole, or not at all."""

import pytest

from studies.losses.archive import write_zip


def test_interrupted_zip_is_not_there(tmp_path):
    def files():
        yield "a.png", b"1"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_zip(tmp_path / "images.zip", files())
    assert not (tmp_path / "images.zip").exists()
