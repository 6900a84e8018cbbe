"""The table of docs/reference/decoding.md, row by row: what each kind of file becomes, computed from the definition."""

import io
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageCms

from mlcd.errors import ImageRejected
from mlcd.images.decode import decode

GENERATOR = np.random.default_rng(20)
RGB = GENERATOR.integers(0, 256, (5, 7, 3), np.uint8)
GRAY = GENERATOR.integers(0, 256, (5, 7), np.uint8)
ALPHA = GENERATOR.integers(0, 256, (5, 7), np.uint8)
BITS = GENERATOR.integers(0, 2, (5, 7)).astype(bool)
INDEXES = np.arange(35, dtype=np.uint8).reshape(5, 7) % 4
PALETTE = np.array([[10, 20, 30], [200, 0, 100], [3, 4, 5], [255, 254, 0]], np.uint8)
WIDE = GENERATOR.integers(0, 65536, (5, 7), np.uint16)
WIDE[0, :4] = [0, 128, 129, 65535]  # 128 * 255 / 65535 is just below a half
CMYK = (200, 30, 90, 40)
LOSSLESS = {"lossless": True, "exact": True}  # WebP; exact keeps the color of transparent pixels


def encode(image, kind="PNG", **options):
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def raw_png(bits, color, size, rows, *chunks):
    """A PNG of bit depths that Pillow does not write."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, color, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + bytes(row) for row in rows)))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(chunk(*each) for each in chunks)
        + pixels
        + chunk(b"IEND", b"")
    )


def palette_image():
    image = Image.fromarray(INDEXES)
    image.putpalette(PALETTE.tobytes())
    return image


def with_alpha(color, alpha):
    return np.concatenate(
        [color if color.ndim == 3 else color[..., None], alpha[..., None]], axis=2
    )


def grays(values):
    return np.repeat(np.asarray(values, np.uint8)[..., None], 3, axis=2)


def over_white(color, alpha):
    """color * alpha + white * (1 - alpha), rounded to the nearest."""
    color, alpha = np.asarray(color, np.int64), np.asarray(alpha, np.int64)[..., None]
    return ((2 * (color * alpha + 255 * (255 - alpha)) + 255) // 510).astype(np.uint8)


def eight_bits(values):
    return grays(np.floor(np.asarray(values, np.float64) * 255 / 65535 + 0.5))


def palette_alpha(*alphas):
    return over_white(PALETTE[INDEXES], np.array([*alphas, *[255] * (4 - len(alphas))])[INDEXES])


def pa_image():
    image = palette_image().convert("PA")
    image.putalpha(Image.fromarray(ALPHA))
    return image


def sixteen(mode, order):
    return Image.frombytes(mode, (7, 5), WIDE.astype(f"{order}u2").tobytes())


COLOR_16 = GENERATOR.integers(0, 65536, (5, 7, 4), np.uint16)

KINDS = {
    "RGB PNG": (encode(RGB), RGB),
    "RGB BMP": (encode(RGB, "BMP"), RGB),
    "RGB PPM": (encode(RGB, "PPM"), RGB),
    "RGB TIFF": (encode(RGB, "TIFF"), RGB),
    "RGB WebP": (encode(RGB, "WEBP", **LOSSLESS), RGB),
    "L PNG": (encode(GRAY), grays(GRAY)),
    "L TIFF": (encode(GRAY, "TIFF", compression="tiff_lzw"), grays(GRAY)),
    "L with one transparent gray": (
        encode(GRAY, transparency=int(GRAY[2, 3])),
        grays(np.where(GRAY[2, 3] == GRAY, 255, GRAY)),
    ),
    "RGB with one transparent color": (
        encode(RGB, transparency=tuple(RGB[2, 3].tolist())),
        np.where((RGB[2, 3] == RGB).all(axis=2, keepdims=True), np.uint8(255), RGB),
    ),
    "LA PNG": (encode(with_alpha(GRAY, ALPHA)), over_white(grays(GRAY), ALPHA)),
    "RGBA PNG": (encode(with_alpha(RGB, ALPHA)), over_white(RGB, ALPHA)),
    "RGBA WebP": (encode(with_alpha(RGB, ALPHA), "WEBP", **LOSSLESS), over_white(RGB, ALPHA)),
    "RGBA TIFF": (encode(with_alpha(RGB, ALPHA), "TIFF"), over_white(RGB, ALPHA)),
    "PA TIFF": (encode(pa_image(), "TIFF"), over_white(PALETTE[INDEXES], ALPHA)),
    "P PNG": (encode(palette_image()), PALETTE[INDEXES]),
    "P with a transparent index": (encode(palette_image(), transparency=1), palette_alpha(255, 0)),
    "P with an alpha per index": (
        encode(palette_image(), transparency=bytes([0, 77, 255])),
        palette_alpha(0, 77),
    ),
    "P GIF with a transparent index": (
        encode(palette_image(), "GIF", transparency=2),
        palette_alpha(255, 255, 0),
    ),
    "CMYK TIFF": (
        encode(Image.new("CMYK", (2, 2), CMYK), "TIFF"),
        np.full((2, 2, 3), [46, 190, 139], np.uint8),
    ),
    "I;16 PNG": (encode(WIDE), eight_bits(WIDE)),
    "I;16 little endian TIFF": (encode(sixteen("I;16", "<"), "TIFF"), eight_bits(WIDE)),
    "I;16 big endian TIFF": (encode(sixteen("I;16B", ">"), "TIFF"), eight_bits(WIDE)),
    "I TIFF within 16 bits": (encode(WIDE.astype(np.int32), "TIFF"), eight_bits(WIDE)),
    "16-bit PGM": (b"P5 7 5 65535\n" + WIDE.astype(">u2").tobytes(), eight_bits(WIDE)),
    "16-bit gray with a transparent value": (
        raw_png(
            16,
            0,
            (7, 5),
            [row.astype(">u2").tobytes() for row in WIDE],
            (b"tRNS", WIDE[0, :1].tobytes()),
        ),
        eight_bits(WIDE),
    ),
    "16-bit RGB PNG": (
        raw_png(16, 2, (7, 5), [row[:, :3].astype(">u2").tobytes() for row in COLOR_16]),
        (COLOR_16[..., :3] >> 8).astype(np.uint8),
    ),
    "16-bit RGBA PNG": (
        raw_png(16, 6, (7, 5), [row.astype(">u2").tobytes() for row in COLOR_16]),
        over_white(COLOR_16[..., :3] >> 8, COLOR_16[..., 3] >> 8),
    ),
    "1-bit PNG": (encode(BITS), grays(255 * BITS)),
    "1-bit TIFF": (encode(BITS, "TIFF", compression="group4"), grays(255 * BITS)),
    "1-bit PBM": (encode(BITS, "PPM"), grays(255 * BITS)),
    "2-bit gray PNG": (raw_png(2, 0, (4, 1), [[0b00_01_10_11]]), grays([[0, 85, 170, 255]])),
    "4-bit gray PNG": (raw_png(4, 0, (2, 1), [[0x5C]]), grays([[0x55, 0xCC]])),
    "2-bit palette PNG": (
        raw_png(
            2,
            3,
            (4, 1),
            [[0b00_01_10_11]],
            (b"PLTE", PALETTE.tobytes()),
            (b"tRNS", bytes([0, 128])),
        ),
        over_white(PALETTE[None], np.array([[0, 128, 255, 255]])),
    ),
    "an ICC profile is ignored": (
        encode(RGB, icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()),
        RGB,
    ),
    "animated GIF": (
        encode(palette_image(), "GIF", save_all=True, append_images=[Image.new("P", (7, 5))]),
        PALETTE[INDEXES],
    ),
    "animated WebP": (
        encode(RGB, "WEBP", save_all=True, append_images=[Image.new("RGB", (7, 5))], **LOSSLESS),
        RGB,
    ),
    "animated PNG": (encode(RGB, save_all=True, append_images=[Image.new("RGB", (7, 5))]), RGB),
    "several pages of TIFF": (
        encode(RGB, "TIFF", save_all=True, append_images=[Image.new("L", (9, 9))]),
        RGB,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_what_its_definition_says(kind):
    data, expected = KINDS[kind]
    got = np.asarray(decode(data))
    assert got.shape == expected.shape
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": "4:4:4"}], ids=str)
def test_a_jpeg_is_pillows_own_picture(photo, mode, options):
    picture = Image.open(io.BytesIO(photo)).resize((75, 50)).convert(mode)
    data = encode(picture, "JPEG", **options)
    assert decode(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()
    # Lossy, but it is this picture: the colors are not swapped, the range is whole.
    assert (
        np.abs(np.asarray(decode(data), np.int64) - np.asarray(picture.convert("RGB"))).mean() < 12
    )


def test_a_jpeg_of_several_pictures_gives_its_first(photo):
    picture = Image.open(io.BytesIO(photo)).resize((75, 50))
    data = encode(picture, "MPO", save_all=True, append_images=[Image.new("RGB", (75, 50))])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert decode(data).tobytes() == decode(encode(picture, "JPEG")).tobytes()


def test_cmyk_and_ycck_jpegs_become_rgb():
    # Lossy: one color, at best quality, comes back within 2 levels of (255 - c) * (255 - k) / 255.
    stored = np.full((16, 16, 4), CMYK, np.uint8)
    ycck = simplejpeg.encode_jpeg(
        255 - stored, quality=100, colorspace="CMYK", colorsubsampling="444"
    )
    cmyk = encode(Image.new("CMYK", (16, 16), CMYK), "JPEG", quality=100)
    for data, transform in ((cmyk, 0), (ycck, 2)):
        assert Image.open(io.BytesIO(data)).info["adobe_transform"] == transform
        assert np.abs(np.asarray(decode(data), np.int64) - [46, 190, 139]).max() <= 2


def turned(pixels, orientation):
    """EXIF 2.32, 4.6.4: where row 0 and column 0 of the stored picture belong."""
    return {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90,
    }[orientation](pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_the_orientation_is_applied_or_ignored(kind, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    lossless = LOSSLESS if kind == "WEBP" else {}
    stored = np.asarray(
        decode(encode(RGB, kind, **lossless))
    )  # as it comes back where the kind is lossy
    data = encode(RGB, kind, exif=exif, **lossless)
    assert np.asarray(decode(data)).tolist() == turned(stored, orientation).tolist()
    # In a TIFF the orientation is a field of the format, which Pillow applies whenever it reads one.
    ignored = turned(stored, orientation) if kind == "TIFF" else stored
    assert np.asarray(decode(data, exif="ignore")).tolist() == ignored.tolist()


def test_a_readable_orientation_in_a_damaged_block_is_applied():
    exif = Image.Exif()
    exif[274], exif[0x0112 + 1] = 6, "x"
    block = exif.tobytes()
    data = encode(RGB, exif=block[:-3])
    assert decode(data).size == (5, 7)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_ignored(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    assert np.asarray(decode(encode(RGB, exif=exif))).tolist() == RGB.tolist()


@pytest.mark.parametrize(
    "image",
    [
        Image.new("F", (4, 4)),
        Image.new("LAB", (4, 4)),
        Image.fromarray(np.array([[0, 65536]], np.int32)),
        Image.fromarray(np.array([[-1, 0]], np.int32)),
    ],
    ids=["F", "LAB", "I above", "I below"],
)
def test_a_range_without_a_single_meaning_is_refused(image):
    with pytest.raises(ImageRejected) as caught:
        decode(encode(image, "TIFF"))
    assert caught.value.reason == "unsupported-format"
