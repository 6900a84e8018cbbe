"""`mlcd embed --texts`: files of texts to embeddings, those that cannot be used beside them."""

import csv
import json
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import mlcd
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import draft_path
from mlcd.cli import cli
from mlcd.encoders import open_text_encoder
from mlcd.errors import (
    ArtifactInvalid,
    Conflict,
    InvalidInput,
    NoTextTower,
    NotFound,
    TextRejected,
)
from mlcd.pipelines import embed_texts as pipeline
from mlcd.pipelines.text_files import read_texts
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter

SILENT = Reporter("silent")
TEXTS = ["a photo of a cat", "two dogs", "an old man in the sky", "a", "the red dog by the cat"]


@pytest.fixture(scope="module")
def encoder(two_tower_model):
    with closing(open_text_encoder(str(two_tower_model))) as opened:
        yield opened


def written(folder, kind, rows):
    """A file of (id, text); an id of None everywhere leaves the column out."""
    path = folder / f"texts.{kind}"
    with_ids = any(key is not None for key, _ in rows)
    records = [{"id": key, "text": text} if with_ids else {"text": text} for key, text in rows]
    if kind == "txt":
        path.write_text("".join(f"{text}\n" for _, text in rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, encoder, kind, with_ids):
    if with_ids and kind == "txt":
        pytest.skip("lines have numbers alone")
    ids = [f"id {number}" if with_ids else None for number in range(len(TEXTS))]
    file = written(tmp_path, kind, list(zip(ids, TEXTS, strict=True)))
    made = pipeline.embed_texts(read_texts(file), encoder, tmp_path / "out", SILENT)
    read = EmbeddingsArtifact.open(made.path)
    assert read.load() == pytest.approx(encoder.encode(encoder.tokenizer(TEXTS)), abs=1e-6)
    numbers = [str(number) for number in range(1, 1 + len(TEXTS))]
    assert read.keys == (ids if with_ids else numbers)
    assert read.skipped() == []
    assert made.fingerprint == encoder.fingerprint
    assert made.summary == {"texts": 5, "errors": 0, "dimension": 32, "model": "tiny-clip"}
    assert [finding.kind for finding in verify(made.path)] == ["embeddings", "texts"]


def test_texts_that_cannot_be_used_are_listed(tmp_path, encoder):
    rows = [
        {"id": "good", "text": "a cat"},
        {"id": "empty", "text": " \n"},
        {"id": "number", "text": 7},
        {"id": "none"},
        {"id": "half", "text": "\ud83d"},
        {"id": "long", "text": "a" * (2**20 + 1)},
        {"id": 9, "text": "the cat " * 1000},
    ]
    file = tmp_path / "texts.jsonl"
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + "\n" + '{"id": "line", "text": [3]}\n'
    )
    made = pipeline.embed_texts(read_texts(file), encoder, tmp_path / "out", SILENT)
    read = EmbeddingsArtifact.open(made.path)
    assert read.keys == ["good", "9"]
    assert {error["key"]: error["reason"] for error in read.skipped()} == {
        "empty": "empty", "number": "not-a-string", "none": "not-a-string",
        "half": "not-unicode", "long": "too-long", "line": "not-a-string",
    }  # fmt: skip


def test_bytes_that_are_no_text_spoil_their_line_alone(tmp_path, encoder):
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufeffa cat\r\n\n".encode() + b"\xff\xfe dog\na\x0bdog\x00\xe2\x80\xa8a dog")
    texts = read_texts(file)
    assert texts.texts == ["a cat", "", "\udcff\udcfe dog", "a\x0bdog\x00\u2028a dog"]
    made = pipeline.embed_texts(texts, encoder, tmp_path / "out", SILENT)
    read = EmbeddingsArtifact.open(made.path)
    assert read.keys == ["1", "4"]
    assert [error["reason"] for error in read.skipped()] == ["empty", "not-unicode"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("t.pdf", b"a", InvalidInput, "texts must be in a file of"),
        ("t.txt", None, NotFound, "does not exist"),
        ("nowhere", None, NotFound, "does not exist"),
        ("t.txt", b"", InvalidInput, "at least one text"),
        ("t.jsonl", b'"a"\n{\n', InvalidInput, "line 2 is not JSON"),
        ("t.jsonl", b"[" * 100_000, InvalidInput, "line 1 is not JSON"),
        ("t.jsonl", b'{"id": "\\ud800", "text": "a"}', InvalidInput, "the id of text 1 must be"),
        ("t.jsonl", b'"a"\n{"id": "", "text": "a"}', InvalidInput, "the id of text 2 must be"),
        ("t.jsonl", b'{"id": [1], "text": "a"}', InvalidInput, "the id of text 1 must be"),
        ("t.jsonl", b'{"id": true, "text": "a"}', InvalidInput, "the id of text 1 must be"),
        ("t.jsonl", b'{"id": 1.5, "text": "a"}', InvalidInput, "the id of text 1 must be"),
        ("t.jsonl", b'{"id": 1, "text": "a"}\n{"id": "1", "text": "b"}', InvalidInput, "2 texts"),
        ("t.csv", b"a,b\n1,2\n", InvalidInput, "must have a column `text`"),
        ("t.csv", b"text,text\na,b\n", InvalidInput, "two columns 'text'"),
        ("t.csv", b"text,id\na,b,c\n", InvalidInput, "line 2 must have 2 fields"),
        ("t.csv", b"text\n\xff\n", InvalidInput, "is not text in UTF-8"),
        ("t.csv", b'id,text\na,x\nb,"5 inch\nc,y\nd,z\n', InvalidInput, "line 3: a quote opens"),
        ("t.txt", "a cat".encode("utf-16"), InvalidInput, "must be in UTF-8"),
        ("t.parquet", b"PAR1", InvalidInput, "cannot be read as .parquet"),
    ],
)
def test_a_file_that_holds_no_texts_is_refused(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_texts(tmp_path / name)


def test_an_empty_cell_is_no_id(tmp_path):
    (tmp_path / "t.csv").write_text('id,text\na,"a ""red"" car, fast"\n,"two\nlines"\n,c\n')
    texts = read_texts(tmp_path / "t.csv")
    assert texts.keys == ["a", "2", "3"]
    assert texts.texts == ['a "red" car, fast', "two\nlines", "c"]


def test_without_a_usable_text_there_is_no_output(tmp_path, encoder):
    file = written(tmp_path, "txt", [(None, ""), (None, " ")])
    with pytest.raises(
        InvalidInput, match=r"none of the 2 texts .* the first, 1: the text is empty"
    ):
        pipeline.embed_texts(read_texts(file), encoder, tmp_path / "out", SILENT)
    assert list(tmp_path.iterdir()) == [file]


def test_an_interrupted_run_continues_to_the_same_bytes(tmp_path, encoder, monkeypatch):
    texts = read_texts(written(tmp_path, "txt", [(None, text) for text in TEXTS * 4]))
    whole = pipeline.embed_texts(texts, encoder, tmp_path / "whole", SILENT, part_entries=6)
    original, calls = pipeline.write_encoded, []

    def fails_at_the_third(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(pipeline, "write_encoded", fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        pipeline.embed_texts(texts, encoder, tmp_path / "out", SILENT, part_entries=6)
    assert draft_path(tmp_path / "out").is_dir()
    continued = pipeline.embed_texts(texts, encoder, tmp_path / "out", SILENT, part_entries=6)
    assert len(calls) == 5  # two parts were there
    assert continued.digest == whole.digest
    assert pipeline.embed_texts(texts, encoder, tmp_path / "out", SILENT, part_entries=6) == (
        continued
    )
    other = read_texts(written(tmp_path, "jsonl", [(None, "a")]))
    with pytest.raises(Conflict):
        pipeline.embed_texts(other, encoder, tmp_path / "out", SILENT, part_entries=6)


def test_other_texts_under_the_same_name_are_found(tmp_path, encoder):
    file = written(tmp_path, "txt", [(None, "a cat")])
    made = pipeline.embed_texts(read_texts(file), encoder, tmp_path / "out", SILENT)
    file.write_text("a dog\n")
    with pytest.raises(ArtifactInvalid, match="does not contain the texts"):
        list(verify(made.path))
    file.unlink()
    assert [finding.checked for finding in verify(made.path)] == [True, False]


def test_the_command_and_the_commands_after_it(tmp_path, two_tower_model):
    file = written(tmp_path, "txt", [(None, text) for text in [*TEXTS, ""]])
    runner = CliRunner()

    def run(*arguments):
        done = runner.invoke(cli, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        return done.output

    out = tmp_path / "out"
    assert "5 embeddings of 32, 1 text skipped" in run(
        "embed", file, out, "--texts", "--model", two_tower_model
    )
    run("cluster", out, tmp_path / "centers", "--clusters", 2, "--hold-out", 0)
    run("label", out, tmp_path / "labels", "--centers", tmp_path / "centers")
    run("index", out, tmp_path / "index")
    run("verify", tmp_path / "labels")
    refused = runner.invoke(
        cli, ["embed", str(file), str(out), "--texts", "--append", "--model", "m"]
    )
    assert refused.exit_code == 2


def test_python_embeds_lists_and_files(tmp_path, two_tower_model, encoder):
    expected = encoder.encode(encoder.tokenizer(TEXTS))
    file = written(tmp_path, "txt", [(None, text) for text in TEXTS])
    with mlcd.load_model(two_tower_model) as model:
        assert model.embed_texts(iter(TEXTS)) == pytest.approx(expected, abs=1e-6)
        assert model.embed_texts([]).shape == (0, 32)
        with pytest.raises(TextRejected, match="text 1: the text is empty"):
            model.embed_texts(["a", ""])
        with pytest.raises(InvalidInput, match="give a list"):
            model.embed_texts("a cat")
        by_model = mlcd.embed_texts(file, model=model)
    by_path = mlcd.embed_texts(file, model=two_tower_model, out=tmp_path / "out")
    for found in (by_model, by_path):
        assert found.keys == ["1", "2", "3", "4", "5"]
        assert found.vectors == pytest.approx(expected, abs=1e-6)
        assert (found.skipped, found.fingerprint) == ([], encoder.fingerprint)
    assert EmbeddingsArtifact.open(tmp_path / "out").keys == by_path.keys
    with mlcd.load_model("pixels") as model, pytest.raises(NoTextTower):
        model.embed_texts(["a"])
    with pytest.raises(NoTextTower):
        mlcd.embed_texts(file, model="hog")
