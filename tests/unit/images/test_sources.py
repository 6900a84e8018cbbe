import contextlib
import hashlib
import io
import json
import os
import sys
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlcd.errors import ImageRejected, InvalidInput, NotFound, Unavailable
from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from tests.saved_datasets import write_saved, write_saved_parts
from tests.unit.nobody import nobody, open_folder


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


def test_links_and_special_files_are_listed_and_not_read(tmp_path):
    images, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    for folder in (images, elsewhere):
        folder.mkdir()
        (folder / "a.png").write_bytes(png(1))
    (images / "b.png").symlink_to(elsewhere / "a.png")
    (images / "c").symlink_to(elsewhere)
    (images / "d.png").symlink_to("nothing")
    (images / "empty.png").touch()
    os.mkfifo(images / "e.png")
    source = open_source(str(images))
    found = {}
    for entry in source.entries:
        try:
            found[entry.key] = source.read(entry)
        except ImageRejected as rejection:
            found[entry.key] = rejection.message
    left_out = "a link or a special file: these are not followed"
    assert found == {
        "a.png": png(1),
        "empty.png": b"",
        **dict.fromkeys(["b.png", "c", "d.png", "e.png"], left_out),
    }
    assert source.files_of(source.entries) == [str(images / "a.png"), str(images / "empty.png")]
    assert source.faults == []
    source.check_unchanged(source.entries)


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


def test_all_names_of_a_file_in_a_tar_are_images_and_what_is_none_is_listed(tmp_path):
    """The archive is GNU tar's of a folder with hard links and symbolic ones."""
    folder = tmp_path / "archived"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.png").write_bytes(png(1))
    (folder / "sub" / "b.png").hardlink_to(folder / "a.png")
    (folder / "c.png").symlink_to("a.png")
    os.mkfifo(folder / "d.png")
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for name in ("a.png", "sub", "c.png", "d.png"):
            archive.add(folder / name, arcname=name)
        outside = tarfile.TarInfo("../e.png")
        outside.size = 3
        archive.addfile(outside, io.BytesIO(b"abc"))
        assert archive.getmember("sub/b.png").islnk()
    source = open_source(str(tmp_path / "s.tar"))
    found = {}
    for entry in source.entries:
        try:
            found[entry.key] = source.read(entry)
        except ImageRejected as rejection:
            found[entry.key] = rejection.reason
    assert found == {
        "s/a": png(1),
        "s/sub/b": png(1),
        "s/c": "unreadable",
        "s/d": "unreadable",
        "s/../e": "unreadable",
    }
    assert source.faults == []


@pytest.fixture
def closed():
    """A folder that anybody may enter, in which what has mode 0 is closed to this process, which is
    nobody's.
    """
    with open_folder() as folder:
        yield folder, nobody


@pytest.mark.parametrize("name", ["a.tar", "a.zip", "a.parquet", "sub", "."])
def test_what_the_file_system_refuses_is_never_left_out_without_a_word(closed, name):
    folder, enter = closed
    if name == "sub":
        (folder / "sub").mkdir()
        (folder / "1.png").write_bytes(png(1))
    elif name != ".":
        (folder / name).write_bytes(b"x")
    (folder / name).chmod(0)
    told = rf"{(folder / name).name} cannot be read: permission denied: let user \d+ read it"
    with enter(), pytest.raises(Unavailable, match=told):
        _ = open_source(str(folder if name == "sub" else folder / name)).entries


def test_faults_of_the_file_system_are_told_from_those_of_a_file(closed):
    folder, enter = closed
    for name in ("1.png", "2.png", "3.png"):
        (folder / name).write_bytes(png(1))
    tar(folder / "s.tar", [("x.png", png(1)), ("y.png", png(2))])
    whole = (folder / "s.tar").read_bytes()
    images, shard = open_source(str(folder)), open_source(str(folder / "s.tar"))
    assert (len(images.entries), len(shard.entries)) == (3, 2)
    (folder / "2.png").chmod(0)
    (folder / "3.png").unlink()
    (folder / "s.tar").write_bytes(whole[:1600])
    told = []
    with enter():
        for source in (images, shard):
            for entry in source.entries:
                try:
                    source.read(entry)
                except ImageRejected as error:
                    told.append(error.message)
    assert "the file cannot be read: permission denied" in told
    assert (images.faults, shard.faults) == (["2.png", "3.png"], [])


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
    with pytest.raises(
        InvalidInput,
        match=r"no image of .* can be listed: a: the zip file is damaged.*, and 1 more",
    ):
        open_source(f"{tmp_path}/*.zip").check_not_empty()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="must hold images"):
        open_source(str(tmp_path / "empty")).check_not_empty()


def test_zip_members_carry_their_folder_as_class(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("cat/1.png", png(1))
        archive.writestr("__MACOSX/cat/1.png", b"junk")
    assert contents(open_source(str(tmp_path / "a.zip"))) == {"cat/1.png": ("cat", png(1))}


def test_parquet_takes_bytes_and_hugging_face_structs(tmp_path):
    pq.write_table(
        pa.table({"key": ["k1", "k2"], "image": [png(1), png(2)], "label": [3, 4]}),
        tmp_path / "a.parquet",
    )
    assert contents(open_source(str(tmp_path / "a.parquet"))) == {
        "k1": ("3", png(1)),
        "k2": ("4", png(2)),
    }
    structs = [{"bytes": png(5), "path": "x"}, {"bytes": None, "path": "y"}]
    pq.write_table(pa.table({"image": structs}), tmp_path / "b.parquet", row_group_size=1)
    found = contents(open_source(str(tmp_path / "b.parquet")))
    assert list(found.values()) == [(None, png(5)), (None, b"")]


def test_parquet_keeps_null_classes_and_refuses_what_is_no_image_or_has_two_names(tmp_path):
    table = {"key": ["a", None], "image": [png(1), png(2)], "label": [None, "cat"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert contents(open_source(str(tmp_path / "a.parquet"))) == {
        "a": (None, png(1)),
        "a/00000001": ("cat", png(2)),
    }
    for column in (["x", "y"], [1, 2], [[1], [2]], [{"path": "x"}, {"path": "y"}]):
        pq.write_table(pa.table({"image": column}), tmp_path / "b.parquet")
        with pytest.raises(InvalidInput, match="image column must hold encoded files"):
            open_source(str(tmp_path / "b.parquet")).entries  # noqa: B018
    pq.write_table(pa.table({"key": ["a", "a"], "image": [png(1), png(2)]}), tmp_path / "c.parquet")
    with pytest.raises(InvalidInput, match="two images named a"):
        open_source(str(tmp_path / "c.parquet")).entries  # noqa: B018


def test_parquet_tells_the_same_files_by_keys_and_sizes_whatever_its_layout(tmp_path):
    images = [png(value) * (value + 1) for value in range(7)]
    table = pa.table(
        {"key": ["a", "", None, "d", "e", "f", "g"], "image": [*images[:3], None, *images[4:]]}
    )
    keys = ["a", "s/00000001", "s/00000002", "d", "e", "f", "g"]
    sizes = [len(data or b"") for data in table["image"].to_pylist()]
    expected = hashlib.sha256(
        "".join(f"{key}\0{size}\0" for key, size in zip(keys, sizes, strict=True)).encode()
    )
    for rows in (7, 3, 1):
        pq.write_table(table, tmp_path / "s.parquet", row_group_size=rows)
        source = open_source(str(tmp_path / "s.parquet"))
        assert source.listing_digest() == expected.hexdigest()
        assert [source.read(entry) for entry in source.entries] == [*images[:3], b"", *images[4:]]


def test_parquet_is_listed_without_its_images_in_memory(tmp_path):
    images = [bytes([number]) * 200_000 for number in range(200)]
    options = {"row_group_size": 200, "write_batch_size": 1, "use_dictionary": False}
    pq.write_table(pa.table({"image": images}), tmp_path / "s.parquet", **options)
    before = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(before)
    pa.set_memory_pool(counted)
    try:
        sizes = list(open_source(str(tmp_path / "s.parquet")).entries.sizes_bytes())
    finally:
        pa.set_memory_pool(before)
    assert sizes == [200_000] * 200
    assert 0 < counted.max_memory() < sum(sizes)


def test_parquet_is_read_through_once_for_all_listings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = pa.table(
        {
            "key": [f"k{row}" for row in range(1000)],
            "image": [png(1)] * 1000,
            "label": ["cat"] * 1000,
        }
    )
    for name in ("a", "b"):
        keys = [f"{name}{row}" for row in range(1000)] if name == "b" else [None] * 1000
        pq.write_table(
            table.set_column(0, "key", pa.array(keys, pa.string())), tmp_path / f"{name}.parquet"
        )
    listed = open_source(str(tmp_path / "*.parquet"))
    first = list(listed.entries)
    with monkeypatch.context() as patched:
        patched.setattr("mlcd.images.parquet.pq.ParquetFile", None)
        again = open_source(str(tmp_path / "*.parquet"))
        assert list(again.entries) == first
        assert again.listing_digest() == listed.listing_digest()
        assert open_source(str(tmp_path / "a.parquet")).entries[999].key == "a/00000999"
    pq.write_table(table, tmp_path / "a.parquet")
    assert open_source(str(tmp_path / "a.parquet")).entries[999].key == "k999"


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
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(InvalidInput, match="must be an image"):
        open_source(str(tmp_path / "a.csv"))
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


def write_pictures(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(len(name)))


def test_a_pattern_of_image_files_is_read_with_keys_below_its_first_wildcard(tmp_path):
    write_pictures(
        tmp_path, "cat/1.png", "cat/2.jpg", "dog/1.png", "dog/old/3.png", "top.png", "cat/notes.txt"
    )
    whole = contents(open_source(str(tmp_path)))

    def found(pattern):
        return contents(open_source(str(tmp_path / pattern)))

    assert found("*/*.png") == {key: whole[key] for key in ("cat/1.png", "dog/1.png")}
    assert found("**/*.png") == {key: whole[key] for key in whole if key.endswith(".png")}
    assert found("dog/*.png") == {"1.png": (None, whole["dog/1.png"][1])}
    assert found("cat/*") == {name: (None, whole[f"cat/{name}"][1]) for name in ("1.png", "2.jpg")}
    assert list(found("top.png")) == ["top.png"]
    with pytest.raises(InvalidInput, match=r"names a folder, .*/cat: .*FOLDER/\*\.jpg"):
        found("*")
    with pytest.raises(NotFound, match="no images at"):
        found("*.gif")
    (tmp_path / "a.tar").touch()
    with pytest.raises(InvalidInput, match="must name files of one kind"):
        found("*.*")


def test_a_list_of_files_is_read_with_keys_below_its_folder(tmp_path):
    write_pictures(tmp_path, "in/cat/1.png", "in/dog/1.png", "in/dog/2.png", "out.png")
    listed = tmp_path / "in" / "some.txt"
    listed.write_text(f"dog/2.png\r\n\n./cat/1.png\n{tmp_path}/in/dog/2.png\n")
    whole = contents(open_source(str(tmp_path / "in")))
    assert contents(open_source(str(listed))) == {
        key: whole[key] for key in ("cat/1.png", "dog/2.png")
    }
    for line, message in (
        ("../out.png", "outside of its folder"),
        ("dog/3.png", "dog/3.png, which does not exist"),
    ):
        listed.write_text(f"cat/1.png\n{line}\n")
        with pytest.raises(InvalidInput, match=message):
            open_source(str(listed))


def test_links_that_a_pattern_or_a_list_names_are_not_followed(tmp_path):
    write_pictures(tmp_path, "in/1.png", "out.png")
    (tmp_path / "in" / "2.png").symlink_to(tmp_path / "out.png")
    (tmp_path / "in" / "some.txt").write_text("1.png\n2.png\n")
    for name in ("*.png", "some.txt"):
        source = open_source(str(tmp_path / "in" / name))
        assert source.read(source.entries[0]) == png(len("in/1.png"))
        with pytest.raises(ImageRejected, match="a link"):
            source.read(source.entries[1])


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("s3://bucket/photos", r".*\[s3\]'"),
        ("gs://bucket/photos", r".*\[gcs\]'"),
        ("abfs://container/photos", r".*\[azure\]'"),
        ("simplecache::s3://bucket/photos", r".*\[s3\]'"),
        ("sftp://host/photos", r"'fsspec\[sftp\]'"),
    ],
)
def test_a_url_whose_file_system_is_not_installed_names_the_package(url, package, monkeypatch):
    for module in ("s3fs", "gcsfs", "adlfs", "paramiko"):
        monkeypatch.setitem(sys.modules, module, None)
    opened = sys.modules["fsspec.registry"]._registry  # earlier in this process
    for protocol in ("s3", "gs", "abfs", "sftp"):
        monkeypatch.delitem(opened, protocol, raising=False)
    with pytest.raises(
        InvalidInput, match=f"needs a package that is not installed: pip install {package}$"
    ):
        open_source(url)


def test_numbers_of_classes_become_their_names_where_the_file_has_them(tmp_path):
    images = pa.array([{"bytes": png(1)}] * 4)
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
    }
    table = pa.table({"image": images, "label": [1, 0, -1, None]})
    pq.write_table(table, tmp_path / "numbers.parquet")
    named = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    pq.write_table(named, tmp_path / "named.parquet")

    def classes(name):
        return list(open_source(str(tmp_path / name)).entries.class_names())

    assert classes("named.parquet") == ["dog", "cat", None, None]
    assert classes("numbers.parquet") == ["1", "0", "-1", None]


def write_classes(path, column, labels, names=None, **columns):
    """Writes a table of images with one column of classes, as parquet or as an Arrow dataset."""
    table = pa.table({"image": [png(number) for number in range(len(labels))], **columns})
    table = table.append_column(column, labels)
    if names is not None:
        facts = {column: {"_type": "ClassLabel", "names": names}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": facts}})}
        )
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return path
    path.mkdir()
    with (path / "a.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    return path


@pytest.mark.parametrize("form", ["a.parquet", "a"])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pa.array([1.0, 0.0, -1.0, np.nan, None, 7.0]), ["dog", "cat", None, None, None, None]),
        (pa.array([1.0, 0.5, np.inf], pa.float32()), ["dog", None, None]),
        (pa.array([1, 0, None], pa.uint8()), ["dog", "cat", None]),
        (pa.array([True, False, None]), [None, None, None]),
        (pa.array(["dog", "0", "1.0", "-1", "wolf", "", "nan", None]),
         ["dog", "cat", "dog", None, "wolf", None, None, None]),
        (pa.array(["dog", "0"], pa.large_string()), ["dog", "cat"]),
        (pa.array(["dog", "0"], pa.string_view()), ["dog", "cat"]),
        (pa.array(["dog", "0", None, "dog"]).dictionary_encode(), ["dog", "cat", None, "dog"]),
        (pa.array(["1", "0"]).cast(pa.decimal128(5, 2)), ["dog", "cat"]),
        (pa.array([b"dog", b"1"]), ["dog", "dog"]),
        (pa.nulls(2), [None, None]),
    ],
)  # fmt: skip
def test_class_labels_name_numbers_of_any_type_and_texts(tmp_path, form, labels, expected):
    path = write_classes(tmp_path / form, "label", labels, ["cat", "dog"])
    source = open_source(str(path))
    assert list(source.entries.class_names()) == expected
    assert not source.problems


@pytest.mark.parametrize("form", ["a.parquet", "a"])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pa.array([1.0, 2.5, np.nan, None, -1.0]), ["1", "2.5", None, None, "-1"]),
        (pa.array([1.0, 0.1], pa.float32()), ["1", "0.1"]),
        (pa.array([1.0, 0.5], pa.float16()), ["1", "0.5"]),
        (pa.array([2**63 + 1, None], pa.uint64()), ["9223372036854775809", None]),
        (pa.array([2, None]), ["2", None]),
        (pa.array(["1.50", "3.00"]).cast(pa.decimal128(5, 2)), ["1.5", "3"]),
        (pa.array([True, False, None]), ["True", "False", None]),
        (pa.array(["1.0", "", None, "ü"]), ["1.0", None, None, "ü"]),
        (pa.array(["a", ""], pa.string_view()), ["a", None]),
        (pa.array([1.0, np.nan, 1.0]).dictionary_encode(), ["1", None, "1"]),
        (pa.array([0, None], pa.timestamp("us")), ["1970-01-01 00:00:00.000000", None]),
    ],
)  # fmt: skip
def test_one_and_one_point_zero_are_one_class_and_nan_is_none(tmp_path, form, labels, expected):
    source = open_source(str(write_classes(tmp_path / form, "label", labels)))
    assert list(source.entries.class_names()) == expected
    assert not source.problems


@pytest.mark.parametrize("form", ["a.parquet", "a"])
@pytest.mark.parametrize("column", ["label", "key"])
@pytest.mark.parametrize(
    "values",
    [
        pa.array([[1], [2, 3]]),
        pa.array([{"a": 1}, {"a": 2}]),
        pa.array([b"\xff\xfe", b"a"]),
        pa.array([b"\xff\xfe", b"a"]).view(pa.string()),
    ],
)
def test_a_column_without_texts_is_named_and_is_no_damage(tmp_path, form, column, values):
    path = write_classes(tmp_path / form, column, values)
    is_checked_by_arrow = form == "a" and values.type == pa.string()
    if is_checked_by_arrow:  # a stream's texts are validated as it is opened
        return
    with pytest.raises(InvalidInput, match=f"the column {column} of .*/a.* (must hold|cannot be)"):
        open_source(str(path)).entries  # noqa: B018


def test_two_columns_of_one_name_are_refused(tmp_path):
    for name in ("label", "key", "image"):
        table = pa.table({"image": [png(1)], "label": ["a"], "key": ["k"]})
        pq.write_table(table.append_column(name, table[name]), tmp_path / "a.parquet")
        with pytest.raises(InvalidInput, match=f"a.parquet has 2 columns named {name}"):
            open_source(str(tmp_path / "a.parquet")).entries  # noqa: B018


def test_keys_of_numbers_are_whole_and_missing_ones_are_rows(tmp_path):
    write_classes(tmp_path / "a.parquet", "key", pa.array([7.0, np.nan, None, 2.5]))
    keys = list(open_source(str(tmp_path / "a.parquet")).entries.keys())
    assert keys == ["7", "a/00000001", "a/00000002", "2.5"]


def test_the_listing_digest_changes_with_the_files(tmp_path):
    (tmp_path / "1.png").write_bytes(png(1))
    before = open_source(str(tmp_path)).listing_digest()
    (tmp_path / "2.png").write_bytes(png(1))
    assert open_source(str(tmp_path)).listing_digest() != before


def test_a_dataset_saved_by_hugging_face_is_read_without_its_package(tmp_path):
    names = ["cat", "dog"]
    images = [png(value) for value in range(5)]
    write_saved(tmp_path / "one", images, [0, 1, 1, -1, 0], names)
    source = open_source(str(tmp_path / "one"))
    assert contents(source) == {
        f"data-00000-of-00001/{row:08d}": (name, images[row])
        for row, name in enumerate(["cat", "dog", "dog", None, "cat"])
    }
    parts = {"train": (images[:2], [0, 1]), "validation": (images[2:], [1, 0, 0])}
    write_saved_parts(tmp_path / "two", parts, names)
    found = contents(open_source(str(tmp_path / "two")))
    assert [name for name, _ in found.values()] == [
        "train/cat", "train/dog", "val/dog", "val/cat", "val/cat",
    ]  # fmt: skip
    assert [data for _, data in found.values()] == images
    assert next(iter(found)) == "train/data-00000-of-00001/00000000"


def test_damage_of_a_saved_dataset_is_named(tmp_path):
    write_saved(tmp_path / "a", [png(1)], [0], ["cat"])
    data, state = tmp_path / "a" / "data-00000-of-00001.arrow", tmp_path / "a" / "state.json"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    source = open_source(str(tmp_path / "a"))
    assert len(source.entries) == 0
    assert [problem.key for problem in source.problems] == ["data-00000-of-00001"]
    data.unlink()
    with pytest.raises(
        NotFound, match=r"data-00000-of-00001\.arrow does not exist, but state\.json names it"
    ):
        open_source(str(tmp_path / "a"))
    state.write_text(json.dumps({"_indices_data_files": [{"filename": "x"}]}))
    with pytest.raises(InvalidInput, match="selection of rows apart"):
        open_source(str(tmp_path / "a"))
    for text, refusal in (
        ("[", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "must hold a list _data_files"),
    ):
        state.write_text(text)
        with pytest.raises(InvalidInput, match=refusal):
            open_source(str(tmp_path / "a"))
    state.write_text(json.dumps({"_data_files": [{"filename": "../x"}]}))
    with pytest.raises(InvalidInput, match="must name files beside it"):
        open_source(str(tmp_path / "a"))


def test_no_changed_byte_of_a_saved_dataset_leads_outside_of_it(tmp_path):
    write_saved(tmp_path / "a", [png(1), png(2)], [0, 1], ["cat", "dog"])
    data = tmp_path / "a" / "data-00000-of-00001.arrow"
    whole = data.read_bytes()
    found = set()
    for at in range(0, len(whole), 7):
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        source = open_source(str(tmp_path / "a"))
        with contextlib.suppress(InvalidInput):
            found.add(len(contents(source)))
    assert found == {0, 2}


def test_a_folder_of_parquet_is_read_as_its_tables_and_the_parts_that_they_name(tmp_path):
    (tmp_path / "data").mkdir()
    for name, label in (("train-00000-of-00001", "cat"), ("test-00000-of-00001", "dog")):
        table = pa.table({"img": [png(1)], "label": [label]})
        pq.write_table(table, tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "README.md").write_text("a card")
    assert [entry.class_name for entry in open_source(str(tmp_path)).entries] == [
        "test/dog",
        "train/cat",
    ]
    (tmp_path / "data" / "test-00000-of-00001.parquet").unlink()
    (alone,) = open_source(str(tmp_path)).entries
    assert (alone.key, alone.class_name) == ("train-00000-of-00001/00000000", "cat")
    (tmp_path / "data" / "a.png").write_bytes(png(1))
    assert "data/a.png" in contents(open_source(str(tmp_path)))
