"""Uploaded archives: what is refused, with its reason, and that a check takes little memory."""

import io
import stat
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlcd.errors import InvalidInput
from mlcd.service.jobs.uploaded_images import ArchiveLimits, check_images

LIMITS = ArchiveLimits(max_entries=100, max_bytes=2**30)


def picture(kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(out, kind)
    return out.getvalue()


PNG = picture()


def zip_of(*members, **options):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return out.getvalue()


def zip_member(name="a.png", mode=0, data=PNG, **changes):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return zip_of((info, data))


def tar_of(*members, form=tarfile.PAX_FORMAT):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def tar_member(name="a.png", kind=tarfile.REGTYPE, data=b"", **changes):
    info = tarfile.TarInfo(name)
    info.type = kind
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return tar_of((info, data))


def bomb(num_bytes):
    out = io.BytesIO()
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.bmp", "w", force_zip64=True) as member,
    ):
        zeros = bytes(2**20)
        for _ in range(num_bytes // 2**20):
            member.write(zeros)
    return out.getvalue()


def with_end(count, directory_bytes, offset=0):
    """A zip that states so many entries in a directory of so many bytes."""
    content = zip_of(("a.png", PNG))[:-22]
    return content + struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, count, count, directory_bytes, offset, 0
    )


def with_end_64(count, directory_bytes):
    content = zip_of(("a.png", PNG))[:-22]
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, directory_bytes, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(content), 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    return content + end + locator + last


def overlapping(num):
    """A zip whose directory names one compressed member `num` times."""
    data = zlib.compress(bytes(2**20), 9)[2:-4]
    name = b"00000.png"
    local = struct.pack(
        "<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 0, zlib.crc32(bytes(2**20)), len(data), 2**20, 9, 0
    )
    directory = b"".join(
        struct.pack(
            "<4s6H3L5H2L",
            *(b"PK\1\2", 20, 20, 0, 8, 0, 0, zlib.crc32(bytes(2**20)), len(data), 2**20),
            *(9, 0, 0, 0, 0, 0, 0),
        )
        + b"%05d.png" % number
        for number in range(num)
    )
    body = local + name + data
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, num, num, len(directory), len(body), 0)
    return body + directory + end


def encrypted():
    content = bytearray(zip_of(("a.png", PNG)))
    place = content.index(b"PK\1\2")
    content[place + 8] |= 1
    return bytes(content)


def pax_header(num_bytes, kind=b"x"):
    """A tar whose extended header states so many bytes, and has them."""
    header = bytearray(512)
    header[:4] = b"long"
    header[100:108] = b"0000644\0"
    header[124:136] = b"%011o\0" % num_bytes
    header[156:157] = kind
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    return bytes(header) + bytes(-(-num_bytes // 512) * 512)


def parquet_of(num_rows, image=PNG, **options):
    out = io.BytesIO()
    pq.write_table(pa.table({"image": [image] * num_rows}), out, **options)
    return out.getvalue()


def footer(num_bytes):
    return b"PAR1" + bytes(64) + struct.pack("<L4s", num_bytes, b"PAR1")


REFUSED = {
    "zip: absolute name": (zip_member("/etc/passwd"), "leads out"),
    "zip: parent": (zip_member("../a.png"), "leads out"),
    "zip: parent inside": (zip_member("a/../../a.png"), "leads out"),
    "zip: backslashes": (zip_member("..\\..\\a.png"), "leads out"),
    "zip: drive": (zip_member("C:\\a.png"), "leads out"),
    "zip: UNC": (zip_member("\\\\host\\a.png"), "leads out"),
    "zip: symbolic link": (zip_member(mode=stat.S_IFLNK | 0o777, data=b"/etc/passwd"), "a link"),
    "zip: device": (zip_member(mode=stat.S_IFCHR), "device"),
    "zip: pipe": (zip_member(mode=stat.S_IFIFO), "device"),
    "zip: encrypted": (encrypted(), "encrypted"),
    "zip: bomb": (bomb(120 * 2**20), "unpack to at most"),
    "zip: overlapping": (overlapping(90), "overlap"),
    "zip: too many": (zip_of(*((f"{n}.png", b"") for n in range(101))), "at most 100 entries"),
    "zip: states too many": (with_end(60_000, 46), "at most 100 entries"),
    "zip: hides its number": (
        overlapping(101)[:-14] + struct.pack("<2H", 1, 1) + overlapping(101)[-10:],
        "at most 100 entries",
    ),
    "zip: large directory": (with_end(1, 2**31), "directory"),
    "zip: large directory, zip64": (with_end_64(1, 2**40), "directory"),
    "zip: too many, zip64": (with_end_64(2**40, 46), "at most 100 entries"),
    "zip: twice": (
        overlapping(2).replace(b"00001.png", b"00000.png"),
        "twice",
    ),
    "zip: cut short": (zip_of(("a.png", PNG))[:-10], "damaged"),
    "zip: only a beginning": (b"PK\3\4" + bytes(600), "damaged"),
    "zip: directory elsewhere": (with_end(1, 46, offset=2**31), "damaged"),
    "tar: absolute name": (tar_member("/etc/passwd"), "leads out"),
    "tar: parent": (tar_member("../a.png"), "leads out"),
    "tar: symbolic link": (tar_member(kind=tarfile.SYMTYPE, linkname="/etc/passwd"), "a link"),
    "tar: hard link": (tar_member(kind=tarfile.LNKTYPE, linkname="/etc/passwd"), "a link"),
    "tar: character device": (tar_member(kind=tarfile.CHRTYPE), "device"),
    "tar: block device": (tar_member(kind=tarfile.BLKTYPE), "device"),
    "tar: pipe": (tar_member(kind=tarfile.FIFOTYPE), "device"),
    "tar: too many": (
        tar_of(*((tarfile.TarInfo(f"{n}.png"), b"") for n in range(101))),
        "at most 100 entries",
    ),
    "tar: twice": (
        tar_of((tarfile.TarInfo("a.png"), PNG), (tarfile.TarInfo("a.png"), PNG)),
        "twice",
    ),
    "tar: large extended header": (pax_header(2**22), "damaged"),
    "tar: large global header": (pax_header(2**22, b"g"), "damaged"),
    "tar: large GNU name": (pax_header(2**22, b"L"), "damaged"),
    "tar: a wrong checksum": (b"a" * 257 + b"ustar" + bytes(400), "damaged"),
    "parquet: too many rows": (parquet_of(101), "at most 100 entries"),
    "parquet: bomb": (
        parquet_of(100, bytes(4 * 2**20), compression="zstd", use_dictionary=False),
        "unpack to at most",
    ),
    "parquet: large footer": (footer(2**30), "directory"),
    "parquet: broken footer": (footer(32), "damaged"),
    "parquet: cut short": (parquet_of(10)[:-20], "d"),
    "gzip": (b"\x1f\x8b" + bytes(100), "neither"),
    "tar, packed": (zlib.compress(tar_member()), "neither"),
    "text": (b"no image", "neither"),
    "nothing": (b"", "neither"),
    "script": (b"#!/bin/sh\nrm -rf /\n", "neither"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "neither"),
    "PDF": (b"%PDF-1.7\n" + bytes(100), "neither"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_files_are_refused_with_a_reason_and_little_memory(tmp_path, name):
    content, reason = REFUSED[name]
    path = tmp_path / "upload"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=reason):
            check_images(path, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        (zip_of(("a.png", PNG), ("b/a.png", PNG), ("b/", b"")), ".zip"),
        (zip_of(("ü 日本.png", PNG)), ".zip"),
        (zip_of(), ".zip"),
        (zip_member(mode=stat.S_IFREG | 0o644), ".zip"),
        (tar_of((tarfile.TarInfo("a.png"), PNG)), ".tar"),
        (tar_of((tarfile.TarInfo("d/" * 60 + "日本.png"), PNG)), ".tar"),
        (tar_of((tarfile.TarInfo("d/" * 99 + "a.png"), PNG), form=tarfile.GNU_FORMAT), ".tar"),
        (parquet_of(100), ".parquet"),
        (PNG, ".png"),
        (picture("JPEG"), ".jpeg"),
        (picture("WEBP"), ".webp"),
        (picture("GIF"), ".gif"),
    ],
)
def test_images_and_archives_are_known_by_their_content(tmp_path, content, suffix):
    path = tmp_path / "upload"
    path.write_bytes(content)
    assert check_images(path, LIMITS) == suffix


def test_an_archive_must_unpack_to_the_limit_at_most(tmp_path):
    path = tmp_path / "upload"
    path.write_bytes(bomb(2**21))
    assert check_images(path, ArchiveLimits(max_entries=1, max_bytes=2**21)) == ".zip"
    with pytest.raises(InvalidInput, match="at most 2097151 bytes, got 2097152"):
        check_images(path, ArchiveLimits(max_entries=1, max_bytes=2**21 - 1))
