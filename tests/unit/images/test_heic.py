"""HEIC by the extra heif; `pillow_heif`, which writes it, is for tests alone."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from mlcd.errors import ImageRejected
from mlcd.images.decode import DecodeLimits, decode, format_of, list_formats
from mlcd.images.heic import is_heic
from tests.conftest import run_python

ROWS, COLUMNS = np.mgrid[0:64, 0:96]
RGB = np.dstack([COLUMNS * 2, ROWS * 3, ROWS + COLUMNS]).astype(np.uint8)
HIDE = "import sys; sys.modules['pi_heif'] = None\n"


def ftyp(major, *compatible):
    brands = major + bytes(4) + b"".join(compatible)
    return (8 + len(brands)).to_bytes(4, "big") + b"ftyp" + brands


def heic(pixels=RGB, **options):
    """Returns a lossless HEIC."""
    pytest.importorskip("pi_heif")
    writer = pytest.importorskip("pillow_heif")
    file = writer.from_pillow(Image.fromarray(pixels))
    buffer = io.BytesIO()
    file.save(buffer, quality=-1, chroma=444, **options)
    return buffer.getvalue()


def test_brands_tell_heic_from_avif():
    heics = [ftyp(b"heic", b"mif1"), ftyp(b"mif1", b"heic"), ftyp(b"msf1", b"hevc"), ftyp(b"heix")]
    others = [ftyp(b"avif", b"mif1"), ftyp(b"mif1", b"avif"), ftyp(b"isom", b"mp41"), b"", b"ftyp"]
    assert all(map(is_heic, heics))
    assert not any(map(is_heic, others))
    assert format_of(heics[0]) == "HEIC"


def test_without_the_extra_the_refusal_names_it(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    (images / "photo.heic").write_bytes(ftyp(b"heic", b"mif1") + bytes(99))
    Image.fromarray(RGB).save(images / "other.png")
    embed = ["mlcd", "embed", str(images), str(tmp_path / "out"), "--model", "pixels"]
    code = f"{HIDE}from mlcd.__main__ import main; sys.argv = {embed!r}; main()"
    run_python(code, check=False)
    (line,) = (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    error = json.loads(line)
    assert error["reason"] == "unsupported-format"
    assert "HEIC needs the extra heif" in error["detail"]


def test_heic_is_decoded_and_pillows_formats_stay_as_they_were():
    data = heic()
    code = (
        "import sys; from PIL import Image; from mlcd.images.decode import decode;"
        " assert decode(sys.stdin.buffer.read()).size == (96, 64); assert 'HEIF' not in Image.OPEN"
    )
    subprocess.run([sys.executable, "-c", code], input=data, check=True)
    assert np.abs(np.asarray(decode(data), int) - RGB).max() <= 2
    assert "HEIC" in list_formats()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_rotation_of_a_heic_is_applied_once(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    turned = Image.fromarray(RGB)
    turned.getexif()[274] = orientation
    expected = np.asarray(ImageOps.exif_transpose(turned), int)
    data = heic(exif=exif.tobytes())
    for policy in ("apply", "ignore"):
        pixels = np.asarray(decode(data, exif=policy), int)
        assert pixels.shape == expected.shape
        assert np.abs(pixels - expected).max() <= 2


def test_the_alpha_of_a_heic_is_over_white():
    alpha = np.zeros((64, 96, 1), np.uint8)
    alpha[:32] = 255
    pixels = np.asarray(decode(heic(np.concatenate([RGB, alpha], axis=2))), int)
    assert (pixels[32:] == 255).all()
    assert np.abs(pixels[:32] - RGB[:32]).max() <= 2


def test_a_heic_is_held_against_the_limits_before_it_is_decoded():
    with pytest.raises(ImageRejected, match="96 x 64") as caught:
        decode(heic(), limits=DecodeLimits(max_pixels=1000))
    assert caught.value.reason == "too-many-pixels"


def test_a_damaged_heic_is_refused():
    data = heic()
    lying = bytearray(data)
    place = lying.index(b"ispe") + 8
    lying[place : place + 8] = (8).to_bytes(4, "big") * 2
    for damaged in (bytes(lying), *(data[:keep] for keep in range(20, len(data) - 5, 211))):
        with pytest.raises(ImageRejected) as caught:
            decode(damaged)
        assert caught.value.reason == "undecodable"
