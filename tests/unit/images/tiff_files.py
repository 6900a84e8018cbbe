"""TIFFs of bit depths and layouts that Pillow does not write."""

import struct
import zlib

import numpy as np

_SHORT, _LONG = 3, 4


def tiff_file(values, bits, photometric, *, order="<", packed=False, planes=1, sample_format=1):
    """Returns a TIFF of one strip, or of one for each of several planes.

    values: integers of shape [height, width] or [height, width, samples].
    """
    height, width, *rest = values.shape
    samples = rest[0] if rest else 1
    parts = [values[..., number] for number in range(samples)] if planes == 2 else [values]
    strips = [_bytes(part.reshape(height, -1), bits, order) for part in parts]
    strips = [zlib.compress(strip) for strip in strips] if packed else strips
    offsets = [8 + sum(map(len, strips[:number])) for number in range(len(strips))]
    tags = [
        (256, _SHORT, [width]),
        (257, _SHORT, [height]),
        (258, _SHORT, [bits] * samples),
        (259, _SHORT, [8 if packed else 1]),
        (262, _SHORT, [photometric]),
        (273, _LONG, offsets),
        (277, _SHORT, [samples]),
        (278, _SHORT, [height]),
        (279, _LONG, [len(strip) for strip in strips]),
        (284, _SHORT, [planes]),
        (339, _SHORT, [sample_format] * samples),
    ]
    start = 8 + sum(map(len, strips))
    entries, outside = b"", b""
    for tag, kind, numbers in tags:
        body = struct.pack(order + {_SHORT: "H", _LONG: "I"}[kind] * len(numbers), *numbers)
        if len(body) > 4:
            place, outside = struct.pack(order + "I", start + len(outside)), outside + body
        else:
            place = body.ljust(4, b"\0")
        entries += struct.pack(order + "HHI", tag, kind, len(numbers)) + place
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", start + len(outside))
    directory = struct.pack(order + "H", len(tags)) + entries + bytes(4)
    return magic + b"".join(strips) + outside + directory


def _bytes(rows, bits, order):
    if bits in (8, 16, 32):
        return (rows % 2**bits).astype(f"{order}u{bits // 8}").tobytes()
    return b"".join(
        np.packbits([value >> bits - 1 - bit & 1 for value in row for bit in range(bits)]).tobytes()
        for row in rows.tolist()
    )
