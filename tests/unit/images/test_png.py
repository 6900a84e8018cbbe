"""PNGs with chunks that no pixel needs: browsers pass over them, whatever is wrong with them."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.decode import decode, decode_small, num_pixels
from mlcd.images.png import drop_unneeded_chunks
from mlcd.images.thumbnail import thumbnail

RGB = np.random.default_rng(49).integers(0, 256, (5, 7, 3), np.uint8)
LARGE = zlib.compress(bytes(1_200_000))
TEXTS = {
    "iCCP": b"x\0\0" + LARGE,
    "zTXt": b"x\0\0" + LARGE,
    "iTXt": b"x\0\1\0\0\0" + LARGE,
    "tEXt": b"x\0" + bytes(2**26 + 1),
}
ORIENTATION = b'<x tiff:Orientation="6"/>'


def encode(image=RGB, **options):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", **options)
    return buffer.getvalue()


def chunk(kind, body, *, damaged=False):
    checksum = zlib.crc32(kind + body) ^ damaged
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def with_chunk(png, extra, place):
    """place: before, between or behind the pixels."""
    if place == "before":
        return png[:33] + extra + png[33:]
    end = png.rindex(b"IEND") - 4
    if place == "behind":
        return png[:end] + extra + png[end:]
    pixels = png[png.index(b"IDAT") + 4 : end - 4]
    halves = chunk(b"IDAT", pixels[:20]), chunk(b"IDAT", pixels[20:])
    return png[: png.index(b"IDAT") - 4] + extra.join(halves) + png[end:]


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_profile_or_text_that_unpacks_to_much_is_dropped(kind, place):
    data = with_chunk(encode(), chunk(kind.encode(), TEXTS[kind]), place)
    assert np.array_equal(decode(data), RGB)
    assert num_pixels(data) == 35
    assert decode_small(data, longest=7).image.size == (7, 5)
    assert thumbnail(data).data


@pytest.mark.parametrize("place", ["before", "between", "behind"])
@pytest.mark.parametrize("length", [0, 3, 40])
@pytest.mark.parametrize(
    "kind", ["gAMA", "pHYs", "zTXt", "iCCP", "eXIf", "hIST", "fcTL", "tRNS", "abCd"]
)
def test_an_ancillary_chunk_with_a_wrong_checksum_is_passed_over(kind, length, place):
    extra = chunk(kind.encode(), b"\1" * length, damaged=True)
    assert np.array_equal(decode(with_chunk(encode(), extra, place)), RGB)


@pytest.mark.parametrize("kind", ["gAMA", "cHRM", "sRGB", "pHYs", "zTXt", "iCCP", "acTL", "fcTL"])
def test_a_chunk_of_metadata_that_is_too_short_is_passed_over(kind):
    assert np.array_equal(decode(with_chunk(encode(), chunk(kind.encode(), b""), "before")), RGB)


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + ORIENTATION),
        (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(ORIENTATION)),
        (b"eXIf", b"MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"),
    ],
)
def test_an_orientation_beside_a_damaged_text_is_applied(kind, body, place):
    extra = chunk(b"tEXt", b"a\0b", damaged=True) + chunk(kind, body)
    assert np.array_equal(decode(with_chunk(encode(), extra, place)), np.rot90(RGB, -1))


@pytest.mark.parametrize("kind", [b"IHDR", b"PLTE"])
def test_a_wrong_checksum_of_a_chunk_that_is_needed_is_damage_and_no_foreign_format(kind):
    picture = Image.fromarray(RGB).quantize(4)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    place = data.index(kind)
    data[place + 4 + int.from_bytes(data[place - 4 : place], "big")] ^= 1
    with pytest.raises(ImageRejected) as caught:
        decode(bytes(data))
    assert caught.value.reason == "undecodable"


def test_a_plain_png_is_not_copied():
    data = encode()
    assert drop_unneeded_chunks(data) is data


def test_texts_without_end_cost_little_and_are_refused():
    text = chunk(b"zTXt", b"XML:com.adobe.xmp\0\0" + zlib.compress(bytes(2**20 - 9)))
    started = time.process_time()
    with pytest.raises(ImageRejected, match=r"damaged|too many parts"):
        decode(with_chunk(encode(), text * 30_000, "before"))
    assert time.process_time() - started < 3


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_transparent_gray_is_compared_at_the_bits_of_the_file(bits):
    values = np.arange(2**bits)
    padding = -len(values) * bits % 8
    row = np.packbits([value >> bits - 1 - bit & 1 for value in values for bit in range(bits)])
    assert padding in (0, 6)
    for transparent in values:
        data = (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", struct.pack(">IIBBBBB", len(values), 1, bits, 0, 0, 0, 0))
            + chunk(b"tRNS", struct.pack(">H", transparent))
            + chunk(b"IDAT", zlib.compress(b"\0" + row.tobytes()))
            + chunk(b"IEND", b"")
        )
        expected = np.where(values == transparent, 255, values * 255 // values[-1])
        assert np.asarray(decode(data))[0, :, 0].tolist() == expected.tolist()
