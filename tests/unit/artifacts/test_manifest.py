import errno
import json
import shutil

import pytest

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Parent, Request, open_artifact
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput, Unavailable

REQUEST = Request("embeddings", {"a": 1}, (Parent("images", "../x", "00"),), "f" * 64)


def make(out, request=REQUEST, content=b"content", log=b"log"):
    with Draft(out, request) as draft:
        with draft.write("part.bin") as path:
            path.write_bytes(content)
        with draft.write("run.log") as path:
            path.write_bytes(log)
        return draft.publish(summary={"n": 1}, logs=("run.log",))


def test_a_published_artifact_opens_and_names_its_files(tmp_path):
    artifact = make(tmp_path / "out")
    assert open_artifact(tmp_path / "out", "embeddings").digest == artifact.digest
    assert artifact.file("part.bin").read_bytes() == b"content"
    assert not (tmp_path / "out.partial").exists()


def test_who_may_read_one_file_may_read_all(tmp_path):
    with Draft(tmp_path / "out", REQUEST) as draft:
        for name in ("weights.bin", "run.log"):
            (draft.path / name).touch(0o600)
        draft.publish(logs=("run.log",))
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1
    assert modes == {(tmp_path / "out" / "manifest.json").stat().st_mode}


def test_digest_is_the_content_and_not_the_times_places_or_logs(tmp_path):
    first = make(tmp_path / "a")
    elsewhere = Request("embeddings", {"a": 1}, (Parent("images", "/elsewhere", "00"),), "f" * 64)
    assert make(tmp_path / "b", elsewhere, log=b"another log").digest == first.digest
    assert make(tmp_path / "c", content=b"other").digest != first.digest
    assert (
        make(tmp_path / "d", Request("embeddings", {"a": 2}, REQUEST.parents, "f" * 64)).digest
        != first.digest
    )


def test_every_flipped_byte_is_found_and_its_file_named(tmp_path):
    make(tmp_path / "out")
    for file in sorted((tmp_path / "out").iterdir()):
        original = file.read_bytes()
        for position in range(len(original)):
            damaged = bytearray(original)
            damaged[position] ^= 0x04
            file.write_bytes(damaged)
            with pytest.raises(ArtifactInvalid, match=file.name):
                open_artifact(tmp_path / "out")
        file.write_bytes(original)
    open_artifact(tmp_path / "out")


def test_a_missing_file_is_named_even_without_full_verification(tmp_path):
    make(tmp_path / "out")
    (tmp_path / "out" / "part.bin").unlink()
    with pytest.raises(ArtifactInvalid, match=r"part\.bin"):
        open_artifact(tmp_path / "out", verify_files=False)


def test_an_unfinished_draft_is_invisible_and_resumable(tmp_path):
    out = tmp_path / "out"
    with Draft(out, REQUEST) as draft, draft.write("part.bin") as path:
        path.write_bytes(b"content")
    assert find_published(out, REQUEST) is None
    with pytest.raises(ArtifactInvalid, match="interrupted"):
        open_artifact(out)
    with Draft(out, REQUEST) as draft:
        assert draft.has("part.bin")
        draft.publish()
    assert find_published(out, REQUEST) is not None


def test_unfinished_work_is_never_thrown_away_for_another_request(tmp_path):
    out = tmp_path / "out"
    with Draft(out, REQUEST) as draft, draft.write("part.bin") as path:
        path.write_bytes(b"content")
    other = Request("embeddings", {"a": 2})
    with pytest.raises(Conflict, match="unfinished work"), Draft(out, other):
        pass
    with Draft(out, REQUEST) as draft:
        assert draft.has("part.bin")
    with Draft(out, other, fresh=True) as draft:
        assert not draft.has("part.bin")


def test_a_directory_that_happens_to_be_called_partial_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(Conflict), Draft(tmp_path / "out", REQUEST):
        pass
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"


def test_a_crash_inside_a_write_leaves_nothing_that_looks_finished(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), Draft(out, REQUEST) as draft, draft.write("part.bin") as path:
        path.write_bytes(b"half")
        raise RuntimeError
    with Draft(out, REQUEST) as draft:
        assert not draft.has("part.bin")
        assert [entry.name for entry in draft.path.iterdir()] == [".request.json"]


def write_set(draft, content, *, meanwhile=lambda _: None):
    with draft.all_or_none("last.bin"):
        for name in ("first.bin", "last.bin"):
            with draft.write(name) as path:
                path.write_bytes(content)
            meanwhile(name)


def test_files_that_belong_together_are_of_one_maker_whoever_comes_late(tmp_path):
    """A worker that was thought dead goes on with its half, and saw other images than the one that
    replaced it.
    """
    drafts = [Draft(tmp_path / "out", REQUEST, shared=True) for _ in range(2)]
    with drafts[0], drafts[1]:

        def other(name):
            if name == "first.bin":
                write_set(drafts[1], b"of the other")

        write_set(drafts[0], b"mine", meanwhile=other)
        assert [(drafts[0].path / name).read_bytes() for name in ("first.bin", "last.bin")] == [
            b"of the other"
        ] * 2
        drafts[0].publish()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"first.bin", "last.bin", "manifest.json"}
    open_artifact(tmp_path / "out")


def test_a_set_that_is_not_finished_leaves_nothing(tmp_path):
    with Draft(tmp_path / "out", REQUEST) as draft:
        with pytest.raises(RuntimeError), draft.all_or_none("last.bin"):
            with draft.write("first.bin") as path:
                path.write_bytes(b"half")
            raise RuntimeError
        assert [entry.name for entry in draft.path.iterdir()] == [".request.json"]

        def nothing_yet(name):
            assert not draft.has(name)

        write_set(draft, b"whole", meanwhile=nothing_yet)
        assert (draft.path / "first.bin").read_bytes() == b"whole"
        with draft.write("alone.bin") as path:
            path.write_bytes(b"at once")
        assert draft.has("alone.bin")


def test_bad_input_leaves_no_draft_behind(tmp_path):
    with pytest.raises(InvalidInput), Draft(tmp_path / "out", REQUEST):
        raise InvalidInput("nothing to do")
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_resume_keeps_what_was_done_before(tmp_path):
    out = tmp_path / "out"
    with Draft(out, REQUEST) as draft, draft.write("checkpoint") as path:
        path.write_bytes(b"hours of work")
    with pytest.raises(InvalidInput), Draft(out, REQUEST):
        raise InvalidInput("a typo")
    with Draft(out, REQUEST) as draft:
        assert draft.has("checkpoint")


def test_a_fresh_draft_forgets_an_attempt_that_died_in_the_middle(tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        with Draft(out, REQUEST, fresh=True) as draft:
            make(draft.path / "centers")


def test_hidden_working_notes_are_no_part_of_the_artifact(tmp_path):
    with Draft(tmp_path / "out", REQUEST) as draft:
        with draft.write(".note") as path:
            path.write_text("done so far")
        artifact = draft.publish()
    assert artifact.files == {}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]


def test_what_a_kill_after_the_rename_leaves_goes_when_the_artifact_is_found(tmp_path):
    out = tmp_path / "out"
    with Draft(out, REQUEST) as draft:
        draft.publish()
    (out / ".user").mkdir()  # nobody was killed: it is none of ours
    assert find_published(out, REQUEST).request() == REQUEST
    assert (out / ".user").is_dir()
    (out / ".note").mkdir()
    (out / ".note" / "inside").touch()
    (out / ".request.json").touch()
    assert find_published(out, REQUEST).request() == REQUEST
    assert [path.name for path in out.iterdir()] == ["manifest.json"]


def test_an_adopted_child_is_whole_or_not_there(tmp_path):
    make(tmp_path / "child")
    with Draft(tmp_path / "out", REQUEST) as draft:
        (draft.path / ".centers.tmp").mkdir()  # what a crash in the middle of the copy leaves
    with Draft(tmp_path / "out", REQUEST) as draft:
        draft.adopt("centers", tmp_path / "child")
        assert list(draft.publish().children) == ["centers"]


def test_only_one_process_builds_an_artifact(tmp_path):
    with (
        Draft(tmp_path / "out", REQUEST),
        pytest.raises(Conflict, match="another process"),
        Draft(tmp_path / "out", REQUEST),
    ):
        pass


def test_a_result_for_another_request_is_never_overwritten(tmp_path):
    make(tmp_path / "out")
    with pytest.raises(Conflict, match="other input or settings"):
        find_published(tmp_path / "out", Request("embeddings", {"a": 2}, REQUEST.parents, "f" * 64))
    with pytest.raises(Conflict, match="appeared meanwhile"):
        make(tmp_path / "out")


def test_a_directory_that_is_no_artifact_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(Conflict, match="must be new or an artifact"):
        find_published(tmp_path / "out", REQUEST)


def test_children_are_part_of_the_identity(tmp_path):
    def build(out, content):
        with Draft(out, Request("model")) as draft:
            make(draft.path / "centers", content=content)
            return draft.publish()

    first, second = build(tmp_path / "a", b"1"), build(tmp_path / "b", b"2")
    assert first.digest != second.digest
    assert build(tmp_path / "c", b"1").digest == first.digest
    shutil.rmtree(tmp_path / "a" / "centers")
    shutil.copytree(tmp_path / "b" / "centers", tmp_path / "a" / "centers")
    with pytest.raises(ArtifactInvalid, match="centers"):
        open_artifact(tmp_path / "a")


def test_another_kind_and_a_newer_schema_are_refused_with_the_remedy(tmp_path):
    make(tmp_path / "out")
    with pytest.raises(ArtifactInvalid, match="holds embeddings, not centers"):
        open_artifact(tmp_path / "out", "centers")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["schema"] = 99
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactInvalid, match="upgrade mlcd"):
        open_artifact(tmp_path / "out")


@pytest.mark.parametrize(
    ("code", "error", "remedy"),
    [(errno.ENOSPC, Unavailable, "free space"), (errno.EACCES, InvalidInput, "writable")],
)
def test_what_the_file_system_refuses_becomes_an_error_with_its_remedy(
    tmp_path, code, error, remedy
):
    with (
        pytest.raises(error, match=remedy),
        Draft(tmp_path / "out", REQUEST) as draft,
        draft.write("part.bin"),
    ):
        raise OSError(code, "refused")
