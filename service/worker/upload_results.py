"""The work of jobs on uploaded files: their place, and the files that their results become."""

import io
import shutil
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

from mlcd.artifacts.embeddings import ERRORS as ERRORS_FILE
from mlcd.artifacts.manifest import open_artifact
from mlcd.errors import ConfigInvalid, NotFound
from mlcd.pipelines.result_files import FinishedWork, write_results
from mlcd.service.jobs.files import FileDraft, FileStore, collections_beside
from mlcd.service.jobs.job import ERRORS, JobSpec, UploadedInput
from mlcd.service.jobs.roots import Roots
from mlcd.service.jobs.uploaded_images import open_upload


class OtherFiles(ConfigInvalid):
    """The server keeps its uploaded files where the worker does not look."""

    name = "other-files"


class UploadResults:
    """The folder of uploaded files as a worker sees it. files: None for a worker without one."""

    def __init__(self, files: FileStore | None) -> None:
        self._files = files

    def roots_of(self, spec: JobSpec) -> Roots:
        """Returns the places that the job may use. Raises OtherFiles."""
        if self._files is None or Path(spec.input).parent != self._files.folder:
            raise OtherFiles(
                f"the job's file is in {Path(spec.input).parent}, which this worker does not use",
                remedy="start one with the MLCD_STATE_DIR of the server",
            )
        places = [self._files.folder]
        if spec.kind == "index":
            places.append(collections_beside(self._files.folder))
        return Roots([str(place) for place in places])

    def are_written(self, upload: UploadedInput) -> bool:
        """Returns whether the job has results, and all are files already; those of an index job are
        its collection alone.
        """
        if upload.results.keys() == {ERRORS}:
            return False
        try:
            for form, file_id in upload.results.items():
                if form != ERRORS:
                    self._store.find(file_id, upload.owner)
        except NotFound:
            return False
        return True

    def write(self, spec: JobSpec) -> None:
        """Writes the results of a job whose artifact or collection is published.

        Raises what `FileDraft.write` raises.
        """
        assert spec.upload is not None
        stem, errors = Path(spec.upload.filename).stem, Path(spec.output) / ERRORS_FILE
        # the errors first, as `are_written` asks for the other results alone
        for form, file_id in sorted(
            spec.upload.results.items(), key=lambda item: item[0] != ERRORS
        ):
            if form == ERRORS and not (errors.is_file() and errors.stat().st_size):
                continue
            with self._store.begin(spec.upload.owner, file_id=file_id) as draft:
                with closing(_DraftStream(draft)) as stream:
                    if form == ERRORS:
                        stream.write(errors.read_bytes())
                    else:
                        source = open_upload(Path(spec.input), spec.upload.filename)
                        work = FinishedWork(open_artifact(Path(spec.output)), source)
                        write_results(work, form, cast("IO[bytes]", stream))
                draft.finish(f"{stem}.{_SUFFIXES.get(form, form)}", "job_output")

    def clear(self, spec: JobSpec) -> None:
        """Removes the artifact that the results were written from."""
        if spec.kind != "index":
            shutil.rmtree(spec.output, ignore_errors=True)

    @property
    def _store(self) -> FileStore:
        assert self._files is not None
        return self._files


_SUFFIXES = {"coco": "coco.json", ERRORS: "errors.jsonl"}


class _DraftStream(io.RawIOBase):
    """A draft as the stream that parquet and zip files are written to."""

    def __init__(self, draft: FileDraft) -> None:
        self._draft = draft

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._draft.write(bytes(data))
