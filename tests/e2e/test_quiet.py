"""Decoders' remarks stay unsaid: commands report a bad image in errors.jsonl alone."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import run_mlcd, succeed


@pytest.fixture
def damaged(tmp_path):
    """One good image, and a TIFF of which libtiff complains on the standard error."""
    folder = tmp_path / "images"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "good.png")
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "TIFF", compression="tiff_lzw")
    content = bytearray(buffer.getvalue())
    content[200:4000] = bytes(3800)
    (folder / "bad.tiff").write_bytes(content)
    return folder


def test_embed_and_label_print_nothing_but_their_result(damaged, tmp_path):
    embedded = run_mlcd("embed", damaged, tmp_path / "e", "--model", "hog")
    assert (embedded.returncode, embedded.stderr) == (0, "")
    (error,) = (tmp_path / "e" / "errors.jsonl").read_text().splitlines()
    assert json.loads(error)["key"] == "bad.tiff"
    succeed("cluster", tmp_path / "e", tmp_path / "c", "--clusters", 1, run=run_mlcd)
    for workers in (1, 2):
        options = ("--centers", tmp_path / "c", "--model", "hog", "--top", 1, "--workers", workers)
        labeled = run_mlcd("label", damaged, tmp_path / f"l{workers}", *options)
        assert (labeled.returncode, labeled.stderr) == (0, "")
