import contextlib
import io
import os
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlcd.errors import ImageRejected, InvalidInput, NotFound
from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec


def png(value):
    buffer = io.BytesIO()
    Image.new("L", (2, 2), value).save(buffer, "PNG")
    return buffer.getvalue()


def tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def contents(source):
    return {entry.key: (entry.class_name, source.read(entry)) for entry in source.entries}


def test_a_folder_lists_by_key_and_leaves_sidecars_and_hidden_files_alone(tmp_path):
    for name in ("b/2.png", "a/1.png", "top.png", "a/notes.txt", ".hidden/3.png", "a/.x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png(1))
    source = open_source(str(tmp_path))
    assert [(entry.key, entry.class_name) for entry in source.entries] == [
        ("a/1.png", "a"),
        ("b/2.png", "b"),
        ("top.png", None),
    ]


def test_names_in_any_script_and_even_broken_ones_become_keys(tmp_path):
    folder = tmp_path / "Käse 猫"
    folder.mkdir()
    (folder / "ñ%20#?.png").write_bytes(png(1))
    (tmp_path / os.fsdecode(b"\xff\xfe.png")).write_bytes(png(2))
    found = contents(open_source(str(tmp_path)))
    assert found["Käse 猫/ñ%20#?.png"] == ("Käse 猫", png(1))
    assert found["\\xff\\xfe.png"] == (None, png(2))
    assert all(key.encode() for key in found)


def test_tar_shards_are_read_at_random_with_their_classes(tmp_path):
    tar(tmp_path / "s-0.tar", [("x.png", png(1)), ("x.cls", b"cat"), ("y.png", png(2))])
    tar(tmp_path / "s-1.tar", [("x.jpg", png(3)), ("x.txt", b"caption")])
    for location in (str(tmp_path), str(tmp_path / "s-*.tar")):
        source = open_source(location)
        assert [entry.key for entry in source.entries] == ["s-0/x", "s-0/y", "s-1/x"]
        assert source.read(source.entries[2]) == png(3)
        assert source.read(source.entries[0]) == png(1)
        assert [entry.class_name for entry in source.entries] == ["cat", None, None]


def test_a_damaged_shard_is_reported_and_its_good_part_read(tmp_path):
    tar(tmp_path / "a.tar", [("1.png", png(1)), ("2.png", png(2))])
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: 1024 + 600])
    (tmp_path / "b.tar").write_bytes(b"\x1f\x8b not a tar")
    source = open_source(str(tmp_path))
    assert source.read(source.entries[0]) == png(1)
    assert "b" in [problem.key for problem in source.problems]


@pytest.mark.parametrize("keep", [512 + 512, 3 * 512, 4 * 512, -1024, -512 * 17])
def test_a_shard_cut_anywhere_is_said(tmp_path, keep):
    tar(tmp_path / "a.tar", [(f"{i}.png", png(i)) for i in range(5)])
    whole = (tmp_path / "a.tar").read_bytes()
    end = len(whole.rstrip(b"\0"))
    cut = {-1024: -(-end // 512) * 512, -512 * 17: end - 700}.get(keep, keep)
    (tmp_path / "a.tar").write_bytes(whole[:cut])
    source = open_source(str(tmp_path))
    readable = 0
    for entry in source.entries:
        with contextlib.suppress(ImageRejected):
            readable += source.read(entry) == png(int(entry.key.split("/")[1]))
    assert source.problems or readable < len(source.entries)


def test_a_damaged_header_in_the_middle_is_said(tmp_path):
    tar(tmp_path / "a.tar", [(f"{i}.png", png(i)) for i in range(5)])
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[2 * 1024 + 5] ^= 0xFF
    (tmp_path / "a.tar").write_bytes(data)
    source = open_source(str(tmp_path))
    assert len(source.entries) == 2
    assert [problem.key for problem in source.problems] == ["a"]


def test_a_stray_tar_does_not_hide_the_images_below(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(png(1))
    tar(tmp_path / "backup.tar", [("x.png", png(2))])
    assert [entry.key for entry in open_source(str(tmp_path)).entries] == ["cat/1.png"]


def test_a_corrupt_zip_member_fails_alone(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("1.png", bytes(range(256)) * 40)
        archive.writestr("2.png", png(2))
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[60:80] = b"\xff" * 20
    (tmp_path / "a.zip").write_bytes(data)
    source = open_source(str(tmp_path / "a.zip"))
    with pytest.raises(ImageRejected):
        source.read(source.entries[0])
    assert source.read(source.entries[1]) == png(2)


def test_a_zip_whose_names_cannot_be_read_is_a_problem_of_its_own(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("é.png", png(1))
    data = (tmp_path / "a.zip").read_bytes().replace("é".encode(), b"\xff\xfe")  # said to be UTF-8
    (tmp_path / "a.zip").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("b.png", png(2))
    source = open_source(str(tmp_path / "*.zip"))
    assert list(source.entries.keys()) == ["b/b.png"]
    assert [problem.key for problem in source.problems] == ["a"]


def test_where_nothing_can_be_listed_the_first_damaged_file_is_named(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.zip").write_bytes(b"no zip")
    with pytest.raises(InvalidInput, match=r"no image of .* can be listed: a: the zip file is damaged.*, and 1 more"):
        open_source(f"{tmp_path}/*.zip").check_not_empty()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="there are no images in"):
        open_source(str(tmp_path / "empty")).check_not_empty()


def test_zip_members_carry_their_folder_as_class(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("cat/1.png", png(1))
        archive.writestr("__MACOSX/cat/1.png", b"junk")
    assert contents(open_source(str(tmp_path / "a.zip"))) == {"cat/1.png": ("cat", png(1))}


def test_parquet_takes_bytes_and_hugging_face_structs(tmp_path):
    pq.write_table(pa.table({"key": ["k1", "k2"], "image": [png(1), png(2)], "label": [3, 4]}), tmp_path / "a.parquet")
    assert contents(open_source(str(tmp_path / "a.parquet"))) == {"k1": ("3", png(1)), "k2": ("4", png(2))}
    structs = [{"bytes": png(5), "path": "x"}, {"bytes": None, "path": "y"}]
    pq.write_table(pa.table({"image": structs}), tmp_path / "b.parquet", row_group_size=1)
    found = contents(open_source(str(tmp_path / "b.parquet")))
    assert list(found.values()) == [(None, png(5)), (None, b"")]


def test_parquet_keeps_null_classes_and_refuses_what_is_no_image_or_has_two_names(tmp_path):
    table = {"key": ["a", None], "image": [png(1), png(2)], "label": [None, "cat"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert contents(open_source(str(tmp_path / "a.parquet"))) == {"a": (None, png(1)), "a/00000001": ("cat", png(2))}
    for column in (["x", "y"], [1, 2], [[1], [2]], [{"path": "x"}, {"path": "y"}]):
        pq.write_table(pa.table({"image": column}), tmp_path / "b.parquet")
        with pytest.raises(InvalidInput, match="image column holds"):
            open_source(str(tmp_path / "b.parquet")).entries  # noqa: B018
    pq.write_table(pa.table({"key": ["a", "a"], "image": [png(1), png(2)]}), tmp_path / "c.parquet")
    with pytest.raises(InvalidInput, match="two images named a"):
        open_source(str(tmp_path / "c.parquet")).entries  # noqa: B018


def test_a_file_over_the_limit_is_not_even_read(tmp_path):
    with (tmp_path / "huge.tif").open("wb") as file:
        file.truncate(2**31)
    source = open_source(str(tmp_path))
    with pytest.raises(ImageRejected) as caught:
        source.read(source.entries[0])
    assert caught.value.reason == "too-many-bytes"


def test_what_cannot_be_a_source_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(NotFound, match="no images"):
        open_source(str(tmp_path / "absent"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InvalidInput, match="one of these"):
        open_source(str(tmp_path / "a.txt"))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidInput, match="image column"):
        open_source(str(tmp_path / "a.parquet")).entries  # noqa: B018


def test_a_file_that_vanishes_or_cannot_be_read_fails_alone(tmp_path):
    for name in ("1.png", "2.png", "3.png"):
        (tmp_path / name).write_bytes(png(1))
    source = open_source(str(tmp_path))
    entries = source.entries
    (tmp_path / "2.png").unlink()
    with pytest.raises(ImageRejected):
        source.read(entries[1])
    prepared = list(prepare_all(source, entries, PreprocessSpec(8, 8), num_threads=2, ahead=2))
    assert [item.entry.key for item in prepared] == ["1.png", "2.png", "3.png"]
    assert [item.pixels is None for item in prepared] == [False, True, False]


def test_the_listing_digest_changes_with_the_files(tmp_path):
    (tmp_path / "1.png").write_bytes(png(1))
    before = open_source(str(tmp_path)).listing_digest()
    (tmp_path / "2.png").write_bytes(png(1))
    assert open_source(str(tmp_path)).listing_digest() != before


def test_real_shards_are_read_whole(shared_data):
    source = open_source(str(shared_data / "wds_cc12m_sample" / "*.tar"))
    assert len(source.entries) == 32
    assert source.read(source.entries[31])[:2] == b"\xff\xd8"
