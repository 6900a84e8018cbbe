import contextlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.decode import DecodeLimits, decode, open_image
from mlcd.images.transform import PreprocessSpec

BOTH = [PreprocessSpec(32, 32), PreprocessSpec(32, 32, decode="fast")]


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.decode)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_the_pixel_cap_is_read_from_the_header(kind, spec):
    header = encode(Image.new("L", (3000, 3000)), kind)[
        :400
    ]  # enough for the header, too little for a pixel
    with pytest.raises(ImageRejected, match="3000 x 3000") as caught:
        spec.prepare(header, DecodeLimits(max_pixels=1_000_000))
    assert caught.value.reason == "too-many-pixels"


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.decode)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_an_image_whose_header_was_read_before_is_decoded_alike(kind, spec):
    noise = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), kind)
    opened = open_image(data)
    assert opened.num_pixels == 70 * 90
    assert (spec.prepare(opened) == spec.prepare(data)).all()


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.decode)
def test_a_damaged_image_whose_header_was_read_before_is_rejected_alike(spec):
    data = encode(Image.new("RGB", (64, 64)))[:60]
    with pytest.raises(ImageRejected) as whole:
        spec.prepare(data)
    with pytest.raises(ImageRejected) as opened:
        spec.prepare(open_image(data))
    assert (whole.value.reason, str(whole.value)) == (opened.value.reason, str(opened.value))


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.decode)
def test_empty_foreign_and_oversized_bytes_have_their_reasons(spec):
    cases = {
        b"": "empty",
        b"no image": "unsupported-format",
        b"%!PS-Adobe-3.0 EPSF": "unsupported-format",
    }
    for data, reason in cases.items():
        with pytest.raises(ImageRejected) as caught:
            spec.prepare(data)
        assert caught.value.reason == reason
    with pytest.raises(ImageRejected) as caught:
        spec.prepare(b"x" * 100, DecodeLimits(max_bytes=99))
    assert caught.value.reason == "too-many-bytes"


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.decode)
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("missing", [3, 4, *(f"{percent} %" for percent in range(1, 100, 7))])
def test_a_truncated_file_is_refused_and_says_nothing_of_the_library(
    photo, missing, progressive, spec
):
    data = encode(Image.open(io.BytesIO(photo)), "JPEG", progressive=True) if progressive else photo
    keep = (
        len(data) - missing
        if isinstance(missing, int)
        else len(data) * (100 - int(missing[:-2])) // 100
    )
    with pytest.raises(ImageRejected) as caught:
        spec.prepare(data[:keep])
    assert caught.value.reason in {
        "undecodable",
        "unsupported-format",
    }  # the latter inside the header
    assert "PIL" not in str(caught.value)
    assert "truncated (" not in str(caught.value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF"])
def test_a_file_cut_behind_its_signature_is_damaged_and_not_foreign(kind):
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    data = encode(Image.fromarray(noise), kind)
    for keep in range(16, 300, 3):
        with pytest.raises(ImageRejected) as caught:
            decode(data[:keep])
        assert caught.value.reason == "undecodable", keep


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_gives_a_picture_or_a_typed_error(position, bit):
    data = bytearray(
        encode(Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)), "PNG")
    )
    data[position % len(data)] ^= 1 << bit
    with contextlib.suppress(ImageRejected):
        assert decode(bytes(data)).mode == "RGB"
