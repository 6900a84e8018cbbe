"""Captions come from wherever they lie beside images, in the order of the entries asked for."""

import io
import json
import tarfile
import unicodedata
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.errors import InvalidInput
from mlcd.images.captions import read_captions
from mlcd.images.sources import open_source

IMAGE = b"no decoder sees this"


def linked(path, members):
    """Writes a tar of data, or of (type, target) of a link or another thing."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if isinstance(data, tuple):
                info.type, info.linkname = data
                archive.addfile(info)
            else:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def tar(path, members):
    linked(path, members.items())


def files(folder, members):
    for name, data in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def captions(location):
    source = open_source(str(location))
    read = read_captions(source, source.entries)
    assert len(read) == len(source.entries)
    found = {key: read.of(index) for index, key in enumerate(source.entries.keys())}
    assert read.num_texts == sum(map(len, found.values()))
    return found


BESIDE = {
    "a/1.jpg": IMAGE,
    "a/1.txt": "Ein Käse \n\nA cheese\r\n".encode(),
    "a/2.jpg": IMAGE,
    "a/2.json": json.dumps({"caption": " One\nline ", "width": 3}).encode(),
    "a/2.txt": b"JSON is preferred",
    "b/3.png": IMAGE,
    "b/3.json": json.dumps({"captions": ["first", "", None, "second"]}).encode(),
    "b/4.png": IMAGE,
    "b/4.json": b'{"status": "no caption here"}',
    "b/4.txt": b"\xef\xbb\xbfthe text counts",
    "b/5.png": IMAGE,
    "b/6.png": IMAGE,
    "b/6.json": b'["boxes", "and no captions"]',
    "b/7.txt": b"of no image",
}
FOUND = {
    "a/1": ("Ein Käse", "A cheese"),
    "a/2": ("One\nline",),
    "b/3": ("first", "second"),
    "b/4": ("the text counts",),
    "b/5": (),
    "b/6": (),
}


def stems(found):
    return {key.partition(".")[0]: texts for key, texts in found.items()}


def test_files_beside_images_of_a_folder(tmp_path):
    files(tmp_path, BESIDE)
    assert stems(captions(tmp_path)) == FOUND
    assert stems(captions(tmp_path / "*/*.png")) == {
        stem: texts for stem, texts in FOUND.items() if stem.startswith("b")
    }


def test_members_beside_images_of_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for name, data in BESIDE.items():
            archive.writestr(name, data)
    assert stems(captions(tmp_path / "images.zip")) == FOUND


def test_members_beside_images_of_tar_shards(tmp_path):
    tar(tmp_path / "s-0.tar", BESIDE)
    # Two images of one sample have the sample's captions; a longer ending is another member.
    tar(
        tmp_path / "s-1.tar",
        {
            "x.jpg": IMAGE,
            "x.seg.png": IMAGE,
            "x.txt": b"of both",
            "x.boxes.json": b'{"caption": "of the boxes"}',
            "y.boxes.json": b"neither JSON",
            "y.jpg": IMAGE,
        },
    )
    found = captions(tmp_path)
    assert found == {f"s-0/{stem}": texts for stem, texts in FOUND.items()} | {
        "s-1/x.jpg": ("of both",),
        "s-1/x.seg.png": ("of both",),
        "s-1/y": (),
    }


def test_a_damaged_shard_has_captions_up_to_the_damage(tmp_path):
    tar(tmp_path / "s.tar", {"x.txt": b"read", "x.jpg": IMAGE, "y.jpg": IMAGE, "y.txt": b"lost"})
    with (tmp_path / "s.tar").open("r+b") as file:
        file.truncate(6 * 512)
    assert captions(tmp_path / "s.tar") == {"s/x": ("read",), "s/y": ()}


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("caption", ["one", None, " "], [("one",), (), ()]),
        ("captions", [["one", "two"], [], None], [("one", "two"), (), ()]),
        ("text", ["as Hugging Face names it", "b", "c"], [("as Hugging Face names it",), *"bc"]),
    ],
)
def test_a_column_of_parquet(column, values, expected, tmp_path):
    table = pa.table({"image": [IMAGE] * 3, column: values, "key": ["p", None, "q"]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    pq.write_table(pa.table({"image": [IMAGE]}), tmp_path / "u.parquet")
    expected = [(texts,) if isinstance(texts, str) else texts for texts in expected]
    keys = ["p", "t/00000001", "q"]
    assert captions(tmp_path / "*.parquet") == {
        **dict(zip(keys, expected, strict=True)),
        "u/00000000": (),
    }


@pytest.mark.parametrize("name", ["captions.csv", "labels.csv", "metadata.csv"])
def test_a_table_of_a_folder_in_csv(name, tmp_path):
    text = (
        '\ufefffile_name,caption\r\n./a/1.jpg,"a ""b"", c"\r\nb.jpg,x\r\na/1.jpg,two\r\nc.jpg,\r\n'
    )
    files(tmp_path, {"a/1.jpg": IMAGE, "b.jpg": IMAGE, "c.jpg": IMAGE, name: text.encode()})
    assert captions(tmp_path) == {"a/1.jpg": ('a "b", c', "two"), "b.jpg": ("x",), "c.jpg": ()}


def test_a_table_without_captions_does_not_count(tmp_path):
    rows = {"captions.jsonl": b"", "labels.csv": b"path,label\na.jpg,cat\n"}
    files(tmp_path, {"a.jpg": IMAGE, "a.txt": b"beside", **rows})
    assert captions(tmp_path) == {"a.jpg": ("beside",)}


def test_captions_of_some_entries_in_their_order(tmp_path):
    rows = [{"path": f"{n}.jpg", "captions": [f"{n}a", f"{n}b"][: n % 3]} for n in range(6)]
    table = "\n".join(map(json.dumps, rows)).encode()
    files(tmp_path, {f"{n}.jpg": IMAGE for n in range(6)} | {"captions.jsonl": table})
    source = open_source(str(tmp_path))
    read = read_captions(source, source.entries.select(np.array([5, 0, 1])))
    assert [read.of(index) for index in range(3)] == [("5a", "5b"), (), ("1a",)]
    assert read.num_texts == 3
    none = read_captions(source, source.entries[:0])
    assert (len(none), none.num_texts) == (0, 0)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"a.json": b'{"caption": '}, r"a\.json is not JSON"),
        ({"a.json": b"[" * 100_000}, r"a\.json is not JSON"),
        ({"a.json": b'{"caption": 3}'}, r"a caption must be text, got another value in .*a\.json"),
        (
            {"a.json": rb'{"caption": "\ud800"}'},
            r"a caption must be text, got another value in .*a\.json",
        ),
        ({"a.txt": b"\xff"}, r"a\.txt is not text in UTF-8"),
        ({"captions.jsonl": b'{"caption": "x"}'}, r"captions\.jsonl, line 1, must name an image"),
        (
            {"captions.jsonl": b'{"path": "a.jpg"}\n7'},
            r"captions\.jsonl, line 2, must be a JSON object",
        ),
        (
            {"captions.jsonl": b'{"path": "a.jpg"}\n}'},
            r"captions\.jsonl, line 2 is not JSON",
        ),
        (
            {"captions.csv": b"path,caption\na.jpg,\xff\n"},
            r"captions\.csv, near line 1, is not text in UTF-8",
        ),
    ],
)
def test_what_cannot_be_read_is_named(members, named, tmp_path):
    files(tmp_path, {"a.jpg": IMAGE, **members})
    with pytest.raises(InvalidInput, match=named):
        captions(tmp_path)
    if next(iter(members)).startswith("a."):
        tar(tmp_path / "s.tar", {"a.jpg": IMAGE, **members})
        with pytest.raises(InvalidInput, match=named.replace("a\\.", r"s\.tar: a\.")):
            captions(tmp_path / "s.tar")


def test_a_parquet_column_of_numbers_is_no_captions(tmp_path):
    pq.write_table(pa.table({"image": [IMAGE], "caption": [3]}), tmp_path / "t.parquet")
    with pytest.raises(
        InvalidInput, match=r"a caption must be text, got another value in .*t\.parquet, row 0,"
    ):
        captions(tmp_path / "t.parquet")


def test_an_image_in_a_tar_has_the_sidecar_of_its_own_name_first(tmp_path):
    linked(
        tmp_path / "s.tar",
        [
            ("22.05.png", IMAGE),
            ("22.05.cls", b"cat"),
            ("22.05.txt", b"a cat"),
            ("22.06.png", IMAGE),
            ("22.06.cls", b"\xef\xbb\xbfdog\r\n"),
            ("22.06.json", b'{"caption": "a dog"}'),
            ("22.06.txt", b"no dog"),
            ("22.07.png", IMAGE),  # the class of another is not its own
            ("33.1.left.png", IMAGE),
            ("33.1.right.png", IMAGE),
            ("33.1.cls", b"pair"),
            ("33.cls", b"farther"),
            ("33.txt", b"of all 33"),
            ("44.2.png", IMAGE),
            ("44.2.txt", b"alone in its sample"),
            ("a.png", IMAGE),
            ("a.coarse.cls", b"longer"),
            ("._a.txt", b"\xff\x00 of macOS"),
            ("._a.cls", b"\xff\xfe\x00"),
        ],
    )
    assert captions(tmp_path / "s.tar") == {
        "s/22.05.png": ("a cat",),
        "s/22.06.png": ("a dog",),
        "s/22.07.png": (),
        "s/33.1.left.png": ("of all 33",),
        "s/33.1.right.png": ("of all 33",),
        "s/44": ("alone in its sample",),
        "s/a": (),
    }
    entries = open_source(str(tmp_path / "s.tar")).entries
    classes = ["cat", "dog", None, "pair", "pair", None, "longer"]
    assert list(entries.class_names()) == classes


def test_hard_links_in_a_tar_are_followed(tmp_path):
    link = tarfile.LNKTYPE
    linked(
        tmp_path / "s.tar",
        [
            ("b.txt", (link, "a.txt")),  # to a later member
            ("a.txt", b"shared"),
            ("a.cls", b"cat"),
            ("b.cls", (link, "./c.cls")),  # by a later link
            ("c.cls", (link, "a.cls")),
            ("a.png", IMAGE),
            ("b.png", (link, "c.png")),
            ("c.png", (link, "a.png")),
            ("c.txt", (link, "b.txt")),
        ],
    )
    assert captions(tmp_path / "s.tar") == {f"s/{each}": ("shared",) for each in "abc"}
    source = open_source(str(tmp_path / "s.tar"))
    assert list(source.entries.class_names()) == ["cat"] * 3
    assert [source.read(entry) for entry in source.entries] == [IMAGE] * 3


@pytest.mark.parametrize(
    "target",
    [
        (tarfile.LNKTYPE, "gone.txt"),
        (tarfile.LNKTYPE, "a.txt"),
        (tarfile.SYMTYPE, "b.txt"),
        (tarfile.FIFOTYPE, ""),
    ],
)
def test_a_link_to_no_file_of_a_tar_is_named(target, tmp_path):
    linked(tmp_path / "s.tar", [("a.png", IMAGE), ("a.txt", target), ("b.txt", b"x")])
    with pytest.raises(
        InvalidInput, match=r"s\.tar: a\.txt must be a plain file, or a link to a file of the shard"
    ):
        captions(tmp_path / "s.tar")
    linked(tmp_path / "t.tar", [("a.png", IMAGE), ("a.cls", target), ("b.txt", b"x")])
    if target[1] not in ("a.txt", "b.txt"):
        with pytest.raises(
            InvalidInput, match=r"t\.tar: a\.cls must be a plain file, or a link to a file"
        ):
            captions(tmp_path / "t.tar")


def test_spellings_of_a_name_are_one_class_and_find_their_captions(tmp_path):
    nfc, nfd = (unicodedata.normalize(form, "Caf\u00e9") for form in ("NFC", "NFD"))
    members = {f"{nfc}/1.png": IMAGE, f"{nfd}/2.png": IMAGE, f"{nfc}.png": IMAGE}
    files(tmp_path / "f", {**members, f"{nfd}.txt": b"beside"})
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as archive:
        for name, data in {**members, f"{nfd}.txt": b"beside"}.items():
            archive.writestr(name, data)
    tar(
        tmp_path / "s.tar",
        {f"{nfc}.png": IMAGE, f"{nfd}.txt": b"beside", f"{nfc}.cls": nfd.encode()},
    )
    for place in ("f", "f.zip"):
        found = captions(tmp_path / place)
        assert set(found) == set(members)  # files are found by their own names
        assert found[f"{nfc}.png"] == ("beside",)
        names = set(open_source(str(tmp_path / place)).entries.class_names())
        assert names == {None, nfc}
    assert list(captions(tmp_path / "s.tar").values()) == [("beside",)]
    assert list(open_source(str(tmp_path / "s.tar")).entries.class_names()) == [nfc]
    table = f"path,caption\n./{nfd}/1.png,one\n{nfc}/2.png,two\n"
    files(tmp_path / "f", {"captions.csv": table.encode()})
    found = captions(tmp_path / "f")
    assert (found[f"{nfc}/1.png"], found[f"{nfd}/2.png"]) == (("one",), ("two",))


def test_what_a_table_names_and_is_not_there_is_counted(tmp_path):
    files(tmp_path, {"a.jpg": IMAGE, "captions.csv": b"path,text\na.jpg,x\nb,y\nb,z\nc,z\n"})
    source = open_source(str(tmp_path))
    unmatched = read_captions(source, source.entries).unmatched
    assert (unmatched.num, unmatched.num_keys, unmatched.first) == (2, 3, "b")


@pytest.mark.parametrize(
    ("name", "table", "seen"),
    [
        (
            "captions.csv",
            b"file;words\na.jpg;x\n",
            "must hold captions, got the columns file;words",
        ),
        ("metadata.csv", b"path\tcaption\na.jpg\tx\n", "must hold captions"),
        (
            "captions.jsonl",
            b'{"img": "a.jpg", "txt": "x"}',
            "must hold captions, got the columns img, txt",
        ),
        (
            "captions.csv",
            b"file,caption\na.jpg,x\n",
            "line 2, must name an image, got .* file, caption",
        ),
        ("captions.csv", b'path,caption\na.jpg,"5 inch\nb.jpg,x\n', "line 2: a quote opens"),
        ("captions.csv", b"path,caption\na.jpg,one, two\n", "line 2 must have 2 fields"),
        ("labels.csv", b"path,caption\na.jpg,one, two\n", "line 2 must have 2 fields"),
    ],
)
def test_a_table_of_another_form_is_refused_with_what_was_seen(name, table, seen, tmp_path):
    files(tmp_path, {"a.jpg": IMAGE, name: table})
    with pytest.raises(InvalidInput, match=seen):
        captions(tmp_path)
