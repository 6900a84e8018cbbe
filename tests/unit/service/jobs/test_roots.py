"""The paths that jobs may read and write: every escape is refused, and reveals nothing of what
exists.
"""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.errors import ConfigInvalid, Conflict, InvalidInput
from mlcd.fetching.url_options import UrlOptions
from mlcd.service.errors import BadRequest, OutsideRoots
from mlcd.service.jobs.roots import Roots
from tests.conftest import write_digits
from tests.unit.nobody import nobody, open_folder


@pytest.fixture
def place(tmp_path):
    """root/ with images, outside/ with some, and links from one to the other."""
    write_digits(tmp_path / "root" / "images", 12)
    write_digits(tmp_path / "outside", 12)
    root = tmp_path / "root"
    (root / "empty").mkdir()
    (root / "blank.tar").touch()
    for name in ("notes/readme.txt", "notes/shards/a.tar", "notes/.thumbnails/a.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"something")
    (root / "away").symlink_to(tmp_path / "outside")
    (root / "within").symlink_to(root / "images")
    (root / "image.tar").symlink_to(tmp_path / "outside" / "0" / "0000.png")
    (tmp_path / "entry").symlink_to(root)
    return tmp_path


@pytest.fixture
def roots(place):
    return Roots([str(place / "root")])


def accepted(roots, location):
    real = roots.resolve_input(str(location))
    roots.check_input(real)
    return real


def free(roots, location, read="/elsewhere"):
    real = roots.resolve_output(str(location))
    roots.check_output(real, input_of_job=read)
    return real


def test_what_is_in_a_root_is_taken_with_its_links_followed(roots, place):
    images = place / "root" / "images"
    assert accepted(roots, images) == str(images)
    assert accepted(roots, f"{images}/") == str(images)
    assert accepted(roots, place / "root" / "within" / "0") == str(images / "0")
    assert accepted(roots, place / "root") == str(place / "root")
    assert free(roots, place / "root" / "within" / "out") == str(images / "out")


def test_a_root_may_be_a_link(place):
    roots = Roots([str(place / "entry")])
    assert accepted(roots, place / "entry" / "images") == str(place / "root" / "images")
    assert accepted(roots, place / "root" / "images") == str(place / "root" / "images")


OUTSIDE = """
    outside nothing root/../outside root/../root/images root/images/../../outside root/away
    root/away/0 root/away/nothing root/away/* entry/images rootless root/*/../../outside/*
""".split()  # noqa: SIM905 - a table


@pytest.mark.parametrize("location", OUTSIDE)
def test_no_path_leads_out_and_nothing_is_told_of_what_is_there(roots, place, location):
    told = set()
    for check in (lambda path: accepted(roots, path), lambda path: free(roots, f"{path}/out")):
        with pytest.raises(OutsideRoots) as refusal:
            check(place / location)
        told.add(str(refusal.value).replace("input", "").replace("output", ""))
    assert len(told) == 1
    assert str(place) not in told.pop()


def test_an_output_beside_a_root_is_refused(roots, place):
    for location in ("root", "root/", "out", "root/../out", "/"):
        with pytest.raises(OutsideRoots):
            free(roots, place / location)


def test_a_wildcard_that_finds_a_link_out_is_refused(roots, place):
    with pytest.raises(OutsideRoots):
        accepted(roots, place / "root" / "*.tar")
    with pytest.raises(OutsideRoots):
        roots.check_files([str(place / "root" / "images"), str(place / "root" / "image.tar")])


def test_image_files_are_taken_by_name_pattern_or_list_and_refused_where_one_leads_out(
    roots, place
):
    images = place / "root" / "images"
    (images / "some.txt").write_text("0/0000.png\n")
    for location in ("0/0000.png", "0/*.png", "some.txt"):
        assert accepted(roots, images / location) == str(images / location)
    (images / "0" / "out.png").symlink_to(place / "outside" / "0" / "0000.png")
    (images / "way").symlink_to(place / "outside")
    for location, listed in (
        ("0/*.png", ""),
        ("some.txt", "0/out.png\n"),
        ("some.txt", "way/0/0000.png\n"),
    ):
        (images / "some.txt").write_text(listed)
        for check in (roots.check_input, roots.check_archives):
            with pytest.raises(OutsideRoots):
                check(str(images / location))


def test_a_folder_of_shards_is_taken_and_refused_where_one_leads_out(roots, place):
    shards = place / "root" / "shards"
    shards.mkdir()
    (shards / "a.tar").write_bytes(b"something")
    assert accepted(roots, shards) == str(shards)
    (shards / "b.tar").symlink_to(place / "root" / "shards" / "a.tar")
    assert accepted(roots, shards) == str(shards)
    (shards / "c.tar").symlink_to(place / "outside" / "0" / "0000.png")
    for check in (roots.check_input, roots.check_archives):
        with pytest.raises(OutsideRoots):
            check(str(shards))


NO_PATHS = ["images", "./images", "~/images", "s3://bucket/x", "file:///etc"]
NO_PATHS += ["simplecache::file:///etc", "http:x"]


@pytest.mark.parametrize("location", [*NO_PATHS, "", "/a\0b"])
def test_what_is_no_plain_absolute_path_is_refused(roots, location):
    for resolve in (roots.resolve_input, roots.resolve_output):
        with pytest.raises(BadRequest, match="absolute path"):
            resolve(location)


@pytest.mark.parametrize("location", ["root/x::file://outside", "root/x::outside", "root::"])
def test_a_chained_address_in_a_root_is_refused(roots, place, location):
    with pytest.raises(BadRequest):
        roots.resolve_input(str(place / location))


@pytest.mark.parametrize(
    "location", ["nothing", "empty", "blank.tar", "notes", "*.zip", "images/*"]
)
def test_an_input_without_anything_to_read_is_refused(roots, place, location):
    with pytest.raises(InvalidInput):
        accepted(roots, place / "root" / location)


def test_a_column_of_urls_is_of_a_table(place):
    links = place / "root" / "links.parquet"
    pq.write_table(pa.table({"link": ["http://example.com/a.png"]}), links)
    roots = Roots([str(place / "root")], web=UrlOptions())
    roots.check_input(str(links), url_column="link")
    with pytest.raises(InvalidInput, match="url-column is for parquet"):
        roots.check_input(str(place / "root" / "images"), url_column="link")


def test_an_output_must_be_new_and_possible(roots, place):
    root = place / "root"
    for taken in ("images", "away", "blank.tar"):
        with pytest.raises(Conflict, match="exists"):
            free(roots, root / taken)
    (root / "dangling").symlink_to(root / "nothing")
    with pytest.raises(Conflict, match="exists"):
        free(roots, root / "dangling")
    with pytest.raises(InvalidInput, match="does not exist"):
        free(roots, root / "no" / "out")
    with pytest.raises(InvalidInput, match="outside the input"):
        free(roots, root / "images" / "out", str(root / "images"))
    assert free(roots, root / "out", str(root / "images")) == str(root / "out")


def test_an_output_named_like_an_unfinished_one_is_refused(roots, place):
    with pytest.raises(InvalidInput, match=r"ends with \.partial"):
        free(roots, place / "root" / "out.partial")


def test_an_output_is_no_part_of_what_is_made_or_was(roots, place):
    root = place / "root"
    (root / "a.partial" / "sub").mkdir(parents=True)
    (root / "made").mkdir()
    (root / "made" / "manifest.json").write_text("{}")
    for inside in ("a.partial/out", "a.partial/sub/out", "made/out"):
        with pytest.raises(InvalidInput, match="output of another step"):
            free(roots, root / inside)
    with pytest.raises(Conflict, match=r"unfinished work is at the output, as a\.partial") as told:
        free(roots, root / "a")
    assert told.value.remedy.endswith(
        "otherwise finish it with `mlcd label` or `mlcd embed`, or remove a.partial"
    )


@pytest.mark.parametrize("pattern", ["*", "ou*", "**/out", "[o]ut*", "?ut.partial"])
def test_an_output_that_the_inputs_wildcard_would_find_is_refused(roots, place, pattern):
    """At the next listing, by another worker, it would be there."""
    root = place / "root"
    with pytest.raises(InvalidInput, match="outside the input"):
        free(roots, root / "out", str(root / pattern))
    assert free(roots, root / "out", str(root / "images" / pattern))


def test_an_outputs_name_leaves_room_and_shows_on_a_terminal(roots, place):
    root = place / "root"
    assert free(roots, root / ("ü" * 100))
    with pytest.raises(InvalidInput, match="more than 200 bytes"):
        free(roots, root / ("ü" * 101))
    for character in "\n\x1b\x9b\x7f":
        with pytest.raises(BadRequest, match="control characters"):
            free(roots, root / f"out{character}[31m")


def test_a_pipe_keeps_nobody_waiting(roots, place):
    root = place / "root"
    (root / "pipes").mkdir()
    os.mkfifo(root / "pipes" / "a.png")
    os.mkfifo(root / "pipes" / "b.tar")
    for location in ("pipes", "pipes/b.tar", "pipes/*.tar"):
        with pytest.raises(InvalidInput):
            accepted(roots, root / location)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_that_cannot_be_written_is_refused(roots, place):
    (place / "root" / "empty").chmod(0o500)
    with pytest.raises(InvalidInput, match="written"):
        free(roots, place / "root" / "empty" / "out")


def test_an_output_where_the_server_may_not_look_is_refused():
    with open_folder() as folder:
        (folder / "closed" / "inner").mkdir(parents=True)
        (folder / "closed").chmod(0o700)
        with nobody(), pytest.raises(InvalidInput, match="or is closed to the server"):
            Roots([folder]).check_output(
                str(folder / "closed" / "inner" / "out"), input_of_job=str(folder / "images")
            )


def test_an_output_below_a_name_that_no_folder_can_have_is_refused(roots, place):
    with pytest.raises(InvalidInput, match="does not exist"):
        free(roots, place / "root" / ("a" * 300) / "out")


def test_a_file_with_wildcards_in_its_name_is_that_file(roots, place):
    name = place / "root" / "images" / "[x]"
    write_digits(name, 3)
    assert accepted(roots, name) == str(name)


def test_a_root_must_be_there(place):
    with pytest.raises(ConfigInvalid, match="not a folder"):
        Roots([str(place / "nothing")])
