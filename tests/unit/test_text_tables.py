"""Tables and lists of others are read whole or refused with the line at fault."""

import io

import pytest

from mlcd.errors import InvalidInput
from mlcd.text_tables import csv_rows, decode_text, json_rows, open_text, read_list, split_lines


def rows(text):
    data = text if isinstance(text, bytes) else text.encode()
    return list(csv_rows("t.csv", open_text(io.BytesIO(data), "t.csv")))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("\ufeffpath,caption\r\na,b\r\n\r\n", ["a", "b"]),
        (" path , caption\n\n\na,b", ["a", "b"]),
        ('p,c\na,a 5" nail\n', ["a", 'a 5" nail']),
        ('p,c\na,"a ""5"" nail, and\nmore"\n', ["a", 'a "5" nail, and\nmore']),
        ("p,c\rx,y\r", ["x", "y"]),
        ("p,c\na,\u2028b\x85\n", ["a", "\u2028b\x85"]),
        ("p,c\na," + "x" * 200_000, ["a", "x" * 200_000]),
        ("p,,\na,,\n", ["a", "", ""]),
    ],
)
def test_a_sound_table_is_read(text, fields):
    assert [row for _, row in rows(text)][1:] == [fields]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('p,c\na,x\nb,"5 inch\nc,y\nd,z\n', "t.csv, line 3: a quote opens in this row"),
        ('p,c\na,"5 inch\nb,"6 inch"\n', "line 2: text follows the closing quote"),
        ('p,c\na,"x\ny"\nb,c,d\n', r"line 4 must have 2 fields like the header \(p, c\), got 3"),
        ("p,c\na\n", "line 2 must have 2 fields"),
        ("p;c\na;b, c\n", r"line 2 must have 1 fields like the header \(p;c\), got 2"),
        ("p,c,p\n", "two columns 'p'"),
        (b"p,c\na,\xff\n", "near line 1, is not text in UTF-8"),
        ("p,c\na,b\n".encode("utf-16"), "t.csv must be in UTF-8"),
        ("p,c\na,b\n".encode("utf-16-le"), "t.csv must be in UTF-8"),
    ],
)
def test_a_table_that_would_be_cut_is_refused(text, named):
    with pytest.raises(InvalidInput, match=named):
        rows(text)


def test_an_empty_table_has_no_rows():
    assert rows("") == rows("\n \n") == []
    assert rows("\ufeffp,c\n") == [(1, ["p", "c"])]


def test_json_lines_skip_empty_ones_and_name_the_damaged_one():
    lines = io.StringIO('{"a": 1}\n\n  \r\n[2]\n')
    assert list(json_rows("t", lines)) == [(1, {"a": 1}), (4, [2])]
    with pytest.raises(InvalidInput, match="t, line 3 is not JSON"):
        list(json_rows("t", ["{}\n", "\n", "{\n"]))


def test_lines_end_at_line_feeds_alone_and_a_mark_is_no_text():
    assert split_lines("\ufeffa\u2028b\r\n\nc\x0b\n") == ["a\u2028b", "", "c\x0b"]
    assert split_lines("") == []
    assert read_list(b"\xef\xbb\xbfa.png\r\n\xff.png\n", "l") == ["a.png", "\udcff.png"]
    for read in (read_list, decode_text):
        with pytest.raises(InvalidInput, match="l must be in UTF-8"):
            read("a.png\n".encode("utf-16"), "l")
