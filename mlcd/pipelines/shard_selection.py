"""The only shard of a selection decides on all images; its intermediate results are saved."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Artifact
from mlcd.label_job import LabelJob
from mlcd.locations import artifact_path, url_of
from mlcd.pipelines.curate import CurateInputs, Curating
from mlcd.pipelines.curation.decisions import CurateOptions
from mlcd.pipelines.embedded_images import read_images_place
from mlcd.pipelines.encoded import OnDone
from mlcd.pipelines.shard_parts import DraftShards


class SelectionShards(DraftShards):
    """The `Shards` protocol over `mlcd curate`."""

    def __init__(
        self,
        job: LabelJob,
        inputs: CurateInputs,
        owner: str,
        check_files: Callable[[Sequence[str]], None],
    ) -> None:
        """check_files: called with the files of the embeddings, unless these are our own copy, and
        with the location of the images if the options read them.
        """
        artifact, out = inputs.embeddings.artifact, artifact_path(job.output)
        if url_of(artifact.path) is None:
            check_files([str(artifact.path / name) for name in artifact.files])
        curating = Curating(inputs, CurateOptions(**job.options), out)
        if curating.options.reads_images:
            check_files([read_images_place(inputs.embeddings)])
        super().__init__(_SelectionPart(curating), out, owner, damaged_files=0)


class _SelectionPart:
    """The `Making` protocol with a single part."""

    def __init__(self, curating: Curating) -> None:
        self._curating, self.request = curating, curating.request
        self.sizes = [curating.inputs.embeddings.num_rows]

    def prepare(self, draft: Draft) -> None: ...

    def has(self, draft: Draft, part: int) -> bool:
        del part
        return self._curating.has(draft)

    def make(self, draft: Draft, part: int, on_done: OnDone) -> None:
        self._curating.make(draft, _Heartbeat(on_done))
        on_done(self.sizes[part], 0)

    def publish(self, draft: Draft) -> Artifact:
        return self._curating.publish(draft)


@dataclass(frozen=True)
class _Heartbeat:
    """The `Stages` and `Meter` protocols: report only that the process is alive."""

    on_done: OnDone

    @contextmanager
    def stage(self, name: str, total: int | None, *, done: int = 0) -> Iterator["_Heartbeat"]:
        del name, total, done
        yield self

    def advance(self, num: int = 1, **facts: object) -> None:
        del num, facts
        self.on_done(0, 0)
