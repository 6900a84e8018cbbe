"""The list of pictures that were looked at survives a crash in the middle of a line."""

from mlcd.service.explore.seen_pictures import FileStamp, SeenPicture, SeenPictures


def test_the_latest_line_holds_and_a_line_cut_short_is_ignored(tmp_path):
    path = tmp_path / "pictures.jsonl"
    pictures = SeenPictures(path)
    first, second = (
        SeenPicture(FileStamp(1, 2), "aa"),
        SeenPicture(FileStamp(3, None), "", "undecodable", "why"),
    )
    pictures.add({"a.jpg": first, "b/ü.jpg": first})
    pictures.add({"b/ü.jpg": second})
    pictures.add({"gone.jpg": first})
    pictures.forget(["gone.jpg", "never.jpg"])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "c.jpg", "stamp": {"size_by')
    again = SeenPictures(path)
    assert again.by_key == {"a.jpg": first, "b/ü.jpg": second}
    assert again.list_skipped() == [("b/ü.jpg", second)]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2  # only what holds is kept
