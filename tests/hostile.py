"""Images that somebody made to hurt: damaged, lying, enormous, of two kinds at once. All are generated, and seeded."""

import io
import random
import struct
import zipfile
import zlib

import numpy as np
from PIL import Image

KINDS = ("JPEG", "PNG", "WEBP", "GIF")
WIDEST = 65_500


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture():
    """Smooth in one direction and noisy in the other."""
    noise = np.random.default_rng(0).integers(0, 64, (48, 64, 3))
    return Image.fromarray((noise + np.arange(64)[None, :, None] * 3).astype(np.uint8))


def truncated(step):
    """(name, bytes) of every kind, at every `step` percent."""
    for kind in KINDS:
        whole = encoded(picture(), kind)
        for percent in range(0, 100, step):
            yield f"{kind} cut at {percent} %", whole[: len(whole) * percent // 100]


def flipped(num):
    """One to eight bits of every kind."""
    source = random.Random(0)
    for kind in (*KINDS, "BMP", "TIFF", "PPM"):
        whole = encoded(picture(), kind)
        for number in range(num):
            data = bytearray(whole)
            for _ in range(source.randint(1, 8)):
                data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            yield f"{kind} with flipped bits, {number}", bytes(data)


def bombs():
    """Few bytes that say they are many pixels; some hold them, some lie."""
    yield "PNG of 400 megapixels", encoded(Image.new("1", (20_000, 20_000)))
    yield "PNG of 85 megapixels", encoded(Image.new("1", (9200, 9200)))
    yield "PNG that says 4 gigapixels", _png(65_535, 65_535, zlib.compress(b"\0" * 100))
    yield "PNG whose text unpacks to 64 MiB", _with_text(encoded(picture()), 2**26)
    yield "PNG with 64 MiB of pixels for one", _png(1, 1, zlib.compress(b"\0" * 2**26, 9))
    yield "GIF of 65535 x 65535", _gif(65_535, 65_535)
    yield "GIF whose frame is larger than its screen", _gif(1, 1, frame=(65_535, 65_535))
    yield "WebP of 16383 x 16383", _webp(16_383, 16_383)
    yield (
        "TIFF of 400 megapixels",
        encoded(Image.new("1", (20_000, 20_000)), "TIFF", compression="group4"),
    )
    yield (
        "TIFF of 80 megapixels",
        encoded(Image.new("1", (8900, 8900)), "TIFF", compression="tiff_deflate"),
    )
    yield "JPEG of 400 megapixels", _jpeg_that_says(20_000, 20_000)
    yield "BMP that says 4 gigapixels", _bmp(2**16, 2**16)


def shapes():
    """As small and as long as pictures are."""
    for size in ((1, 1), (1, 65_535), (65_535, 1), (2, 2), (WIDEST, 8), (8, WIDEST), (7, 13)):
        for kind in KINDS:
            if (kind != "WEBP" or max(size) <= 16_383) and (kind != "JPEG" or max(size) <= WIDEST):
                yield (
                    f"{kind} of {size[0]} x {size[1]}",
                    encoded(Image.new("RGB", size, (9, 99, 200)), kind),
                )


def polyglots():
    """Of two kinds at once, of the wrong one, or of none that is taken."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "x" * 1000)
    yield "JPEG and ZIP", encoded(picture(), "JPEG") + archive.getvalue()
    yield "ZIP", archive.getvalue()
    yield "GIF and JavaScript", b"GIF89a/*\0\0\0\0\0*/=1;alert(1)//"
    yield "whole GIF and JavaScript", encoded(picture(), "GIF") + b"*/=1;alert(1)"
    yield "HTML", b"<html><script>alert(1)</script></html>"
    yield (
        "HTML in a JPEG's comment",
        encoded(picture(), "JPEG", comment=b"<script>alert(1)</script>"),
    )
    yield "SVG", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield (
        "XML of a billion laughs",
        b'<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;&b;">]><svg>&c;</svg>',
    )
    yield "PDF", b"%PDF-1.7\n1 0 obj<</OpenAction<</S/JavaScript/JS(app.alert(1))>>>>endobj"
    yield "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run"
    yield (
        "ImageMagick's language",
        b"push graphic-context\nfill 'url(https://example.com/x.png)'\npop graphic-context",
    )
    yield "FITS", b"SIMPLE  =                    T".ljust(80) + b" " * 2800
    yield "empty", b""
    yield "one byte", b"\xff"
    yield "zeros", b"\0" * 100_000
    yield "noise", np.random.default_rng(1).bytes(100_000)
    for kind in KINDS:
        yield f"{kind} twice", 2 * encoded(picture(), kind)


def animations():
    """Of very many frames; the first is the picture."""
    frames = [Image.new("L", (16, 16), shade % 256) for shade in range(2000)]
    yield "GIF of 2000 frames", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield (
        "WebP of 500 frames",
        encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:500]),
    )
    yield (
        "APNG of 500 frames",
        encoded(frames[0], "PNG", save_all=True, append_images=frames[1:500]),
    )
    yield (
        "TIFF of 500 pages",
        encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:500]),
    )
    yield "TIFF whose pages go round", _endless_tiff()


def _chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width, height, pixels):
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + _chunk(b"IDAT", pixels)
        + _chunk(b"IEND", b"")
    )


def _with_text(png, num_bytes):
    return png[:33] + _chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * num_bytes, 9)) + png[33:]


def _gif(width, height, frame=None):
    frame = frame or (width, height)
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return screen + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\x00;"


def _webp(width, height):
    frame = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0" * 30
    body = b"WEBPVP8L" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _jpeg_that_says(width, height):
    data = encoded(picture(), "JPEG")
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


def _bmp(width, height):
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 100, 0, 0, 54) + head + b"\0" * 100


def _endless_tiff():
    data = bytearray(encoded(picture(), "TIFF"))
    (directory,) = struct.unpack_from("<I", data, 4)
    (num,) = struct.unpack_from("<H", data, directory)
    struct.pack_into("<I", data, directory + 2 + 12 * num, directory)
    return bytes(data)


def labyrinths():
    """Few bytes, much work: what a reader does for each segment, chunk, block, tag or scan."""
    jpeg = encoded(picture(), "JPEG")
    yield "JPEG of 500,000 comments", jpeg[:2] + b"\xff\xfe\x00\x02" * 500_000 + jpeg[2:]
    scans = encoded(Image.new("L", (8000, 8000)), "JPEG", progressive=True)
    yield "JPEG of 2,000 scans", _repeated_scan(scans, 2000)
    png = encoded(picture())
    yield "PNG of 300,000 chunks", png[:33] + _chunk(b"abCd", b"") * 300_000 + png[33:]
    body = zlib.compress(b"".join(b"\0" + bytes(700) for _ in range(700)), 0)
    pieces = b"".join(_chunk(b"IDAT", body[place : place + 1]) for place in range(len(body)))
    head = struct.pack(">IIBBBBB", 700, 700, 8, 0, 0, 0, 0)
    yield (
        "PNG in chunks of a byte",
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + pieces + _chunk(b"IEND", b""),
    )
    gif = encoded(picture(), "GIF")
    place = 13 + 3 * 2 ** ((gif[10] & 7) + 1)
    comment = b"!\xfe" + (b"\xff" + b"a" * 255) * 20_000 + b"\0"
    yield "GIF of 5 MB of comment", gif[:place] + comment + gif[place:]
    yield "TIFF of 2,000 tags with the same megabyte each", _tiff_of_tags(2000, 2**20)


def _repeated_scan(jpeg, num):
    """The last scan, with its tables, `num` times more."""
    end = jpeg.rindex(b"\xff\xd9")
    start = max(place for place in (jpeg.rfind(b"\xff\xda", 0, end), 0))
    return jpeg[:end] + jpeg[start:end] * num + jpeg[end:]


def _tiff_of_tags(num, size):
    basic = [
        (256, 4),
        (257, 4),
        (258, 8),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, 1),
        (278, 4),
        (279, 16),
    ]
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in basic]
    entries += [struct.pack("<HHII", 40_000 + tag, 1, size, 8) for tag in range(num)]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", 8 + size) + b"\x55" * size + directory
