"""The work on a Ray cluster, without Ray: a stand-in runs each call when its result is asked for."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import draft_path
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.pixels import PixelsEncoder
from mlcd.errors import ConfigInvalid, Conflict, MlcdError, Unavailable
from mlcd.extras import install_command
from mlcd.images.sources import open_source
from mlcd.pipelines.cluster import ClusterOptions, cluster
from mlcd.pipelines.embed import embed
from mlcd.pipelines.label import LabelOptions, label
from mlcd.pipelines.ray import clusters, session, shards
from mlcd.pipelines.ray.session import RayOptions
from mlcd.pipelines.ray.workers import make_shards
from mlcd.progress import Reporter
from tests.conftest import call_mlcd, refuse, write_digits
from tests.written_artifacts import write_centers

SILENT = Reporter("silent")
TWO = RayOptions(workers=2)
TINY = RayOptions(workers=2, memory_gib=1e-6)  # no two blocks of centers fit


class Lost(Exception):
    """Stands for RayActorError."""


class Failed(Exception):
    """Stands for RayTaskError."""

    def __init__(self, cause):
        super().__init__()
        self.cause = cause


class StandIn:
    """The part of Ray that is used. lose: the numbers of the calls whose worker dies before them."""

    exceptions = SimpleNamespace(RayActorError=Lost, RayTaskError=Failed, RayError=Lost)

    def __init__(self, lose=()):
        self.lose, self.calls, self.hired, self.alive = lose, 0, 0, set()

    def remote(self, *, num_cpus, num_gpus=0.0, memory=None, **_):
        assert (num_cpus, num_gpus) in ((1.0, 0.0), (0, 0.0))
        return lambda kind: SimpleNamespace(
            remote=lambda *given: (
                self._hire(kind(*given)) if isinstance(kind, type) else self._call(kind, given)
            )
        )

    def _call(self, function, given):
        try:
            return function(*(each.value if isinstance(each, Stored) else each for each in given))
        except MlcdError as error:  # raised when the result is asked for
            return Raised(error)

    def put(self, value):
        return Stored(value)

    def _hire(self, actor):
        def call(name):
            return SimpleNamespace(
                remote=lambda *given, **named: (worker, name, given, tuple(named.items()))
            )

        worker = Worker(actor)
        worker.open, worker.make = call("open"), call("make")
        self.hired += 1
        self.alive.add(worker)
        return worker

    def wait(self, tasks, num_returns, timeout):
        assert num_returns == 1
        return tasks[-1:], tasks[:-1]

    def get(self, task):
        if isinstance(task, Raised):
            raise Failed(task.error) from task.error
        if not isinstance(task, tuple):
            return task  # of a function, which was called at once
        if not (len(task) == 4 and isinstance(task[0], Worker)):
            return task  # the results of one, too
        worker, name, given, named = task
        assert worker in self.alive
        number, self.calls = self.calls, self.calls + 1
        if number in self.lose:
            raise Lost
        try:
            return getattr(worker.actor, name)(*given, **dict(named))
        except Exception as error:
            raise Failed(error) from error

    def kill(self, worker):
        self.alive.remove(worker)

    @staticmethod
    def cluster_resources():
        return {"CPU": 4.0, "memory": 1e9}


class Stored(SimpleNamespace):
    def __init__(self, value):
        super().__init__(value=value)


class Raised(SimpleNamespace):
    def __init__(self, error):
        super().__init__(error=error)

    def __iter__(self):  # of several results, each fails
        return iter((self, self))


class Worker:
    def __init__(self, actor):
        self.actor = actor


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """This process sees a GPU, and what it hides comes back: its workers are this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")


@pytest.fixture
def stand_in(monkeypatch):
    """Connects to a stand-in that loses some workers while they begin and others at work."""
    ray = StandIn(lose={1, 4, 6})

    @contextmanager
    def connected(address):
        yield ray

    for module in (shards, clusters):
        monkeypatch.setattr(module, "ray_session", connected)
    return ray


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = write_digits(tmp_path_factory.mktemp("on_ray") / "images", 60)
    (folder / "3" / "0003.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def centers(images):
    encoder, out = PixelsEncoder(), images.parent / "centers"
    vectors = np.abs(np.random.default_rng(0).standard_normal((1000, encoder.dimension)))
    write_centers(out, vectors, encoder.fingerprint)
    return out


@pytest.fixture(scope="module")
def rows(images):
    artifact = embed(open_source(str(images)), PixelsEncoder(), images.parent / "rows", SILENT)
    return EmbeddingsArtifact.open(artifact.path)


def files_of(artifact):
    return {name: (artifact.path / name).read_bytes() for name in artifact.files}


def test_labels_have_the_bytes_of_one_process(images, centers, stand_in, tmp_path):
    options = LabelOptions(str(images), str(centers), top=3, model="pixels", part_entries=8)
    alone = label(options, tmp_path / "alone", reporter=SILENT)
    there = shards.label_on_ray(options, tmp_path / "there", TWO, SILENT)
    assert (there.digest, there.summary) == (alone.digest, alone.summary)
    assert files_of(there) == files_of(alone)
    assert there.summary["errors"] == 1
    assert stand_in.hired == 2 + 3
    assert not stand_in.alive  # the cluster gets its room back
    calls = stand_in.calls
    again = shards.label_on_ray(options, tmp_path / "there", TWO, SILENT)
    assert again.digest == alone.digest
    assert stand_in.calls == calls


@pytest.mark.parametrize(
    ("mode", "probes", "on"), [("exact", None, TWO), ("exact", None, TINY), ("approximate", 4, TWO)]
)
def test_labels_of_embeddings_from_a_relative_place(
    rows, centers, mode, probes, on, stand_in, tmp_path, monkeypatch
):
    monkeypatch.chdir(rows.artifact.path.parent)
    options = LabelOptions("rows", str(centers), mode=mode, probes=probes, part_rows=8)
    alone = label(options, tmp_path / "alone", reporter=SILENT)
    there = shards.label_on_ray(options, tmp_path / "there", on, SILENT)
    assert (there.digest, there.summary) == (alone.digest, alone.summary)


def test_embeddings_have_the_bytes_of_one_process(images, stand_in, tmp_path):
    alone = embed(open_source(str(images)), PixelsEncoder(), tmp_path / "alone", SILENT)
    there = shards.embed_on_ray(
        str(images), "pixels", tmp_path / "there", TWO, SILENT, encoder=EncoderOptions()
    )
    assert (there.digest, there.summary) == (alone.digest, alone.summary)


@pytest.mark.parametrize(
    "given",
    [
        {"num_clusters": 7},
        {"num_clusters": 8, "subtract_mean": True, "hold_out": 0.0, "names": True, "levels": (3,)},
        {"num_clusters": 5, "sample": 4, "balanced": True, "report": True},
    ],
)
@pytest.mark.parametrize("on", [TWO, TINY], ids=["whole", "in-parts"])
def test_centers_have_the_bytes_of_one_process(rows, given, on, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "_choose_block_rows", lambda num_rows, num_workers: 9)
    monkeypatch.setattr(session, "_LEAST_CENTERS", 3)
    options = ClusterOptions(**given)
    alone = cluster(rows, tmp_path / "alone", options, reporter=SILENT)
    there = clusters.cluster_on_ray(rows, tmp_path / "there", options, on, SILENT)
    assert (there.digest, there.summary) == (alone.digest, alone.summary)


def test_a_node_with_another_version_is_refused(rows, images, centers, stand_in, tmp_path):
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(session, "__version__", "0.0.9")
        with pytest.raises(ConfigInvalid, match=r"has mlcd 0\.0\.9.*one version on all"):
            clusters.cluster_on_ray(
                rows, tmp_path / "a", ClusterOptions(num_clusters=5), TWO, SILENT
            )
        stand_in.lose = ()
        options = LabelOptions(str(images), str(centers), model="pixels")
        with pytest.raises(ConfigInvalid, match=r"has mlcd 0\.0\.9"):
            shards.label_on_ray(options, tmp_path / "b", TWO, SILENT)


def test_blocks_are_neither_tiny_nor_huge():
    sizes = [clusters._choose_block_rows(num, 10) for num in (1, 200_000, 1 << 30)]
    assert sizes == [8192, 10_000, 1 << 20]


def test_a_killed_driver_is_run_again_and_goes_on(images, centers, stand_in, tmp_path, monkeypatch):
    options = LabelOptions(str(images), str(centers), model="pixels", part_entries=8)
    made, out = [], tmp_path / "there"

    def killed_soon(shard, errors):
        made.append(shard)
        if len(made) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            shards,
            "make_shards",
            lambda *given, on_made, **named: make_shards(*given, on_made=killed_soon, **named),
        )
        shards.label_on_ray(options, out, TWO, SILENT)
    assert not stand_in.alive
    assert len(list(draft_path(out).glob("part-*"))) == 3
    stand_in.lose, before = (), stand_in.calls
    shards.label_on_ray(options, out, TWO, SILENT)
    assert stand_in.calls - before <= 2 + 5
    alone = label(options, tmp_path / "alone", reporter=SILENT)
    assert label(options, out, reporter=SILENT).digest == alone.digest


def test_what_one_process_left_is_finished_there_and_the_other_way(
    images, centers, stand_in, tmp_path
):
    options = LabelOptions(str(images), str(centers), model="pixels", part_entries=8)
    alone = label(options, tmp_path / "alone", reporter=SILENT)
    other = LabelOptions(str(images), str(centers), model="pixels", part_entries=16)
    with Draft(tmp_path / "there", alone.request()) as draft:
        draft.write_json(".note.json", "begun")
    with pytest.raises(Conflict, match="unfinished work on other input"):
        shards.label_on_ray(other, tmp_path / "there", TWO, SILENT)
    there = shards.label_on_ray(options, tmp_path / "there", TWO, SILENT)
    assert there.digest == alone.digest


class Stub:
    """Shards that fail as they are told: {shard: [error, …]}."""

    def __init__(self, fails):
        self.fails, self.asked = fails, []

    @contextmanager
    def __call__(self, num_threads):
        assert num_threads == 1
        yield self

    def check(self): ...

    def make(self, shard, on_done, *, is_last_try):
        self.asked.append((shard, is_last_try))
        if self.fails.get(shard):
            raise self.fails[shard].pop(0)
        return 0


def run(stub, ray, num=3, options=TWO):
    made = []
    make_shards(
        ray, stub, range(num), options, on_made=lambda shard, _: made.append(shard), on_wait=print
    )
    return made


def test_a_passing_fault_costs_no_images():
    stub = Stub({1: [Unavailable("away"), Unavailable("away")]})
    assert sorted(run(stub, StandIn())) == [0, 1, 2]
    assert [last for shard, last in stub.asked if shard == 1] == [False, False, True]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Unavailable("the disk is away"), Unavailable),
        (Conflict("the input changed"), Conflict),
        (ValueError("a bug"), RuntimeError),
    ],
)
def test_what_a_worker_raises_is_raised_here(error, raised):
    ray = StandIn()
    with pytest.raises(raised):
        run(Stub({1: [error] * 3}), ray)
    assert not ray.alive


def test_a_shard_that_ends_every_worker_is_named_and_the_others_are_made():
    class Deadly(Stub):
        def make(self, shard, on_done, *, is_last_try):
            if shard == 1:
                ray.lose = {ray.calls - 1}
                raise Lost
            return super().make(shard, on_done, is_last_try=is_last_try)

    class Passing(StandIn):
        def get(self, task):
            try:
                return super().get(task)
            except Failed as error:
                raise error.cause from None

    ray, stub = Passing(), Deadly({})
    with pytest.raises(Unavailable, match=r"the last one at shard 1.*the same command continues"):
        run(stub, ray, num=5)
    assert sorted(shard for shard, _ in stub.asked) == [0, 2, 3, 4]


def test_the_missing_extra_is_named(images, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = call_mlcd("embed", images, tmp_path / "out", "--model", "pixels", "--on", "ray")
    assert result.returncode == 2
    assert result.stderr == f"mlcd: --on ray needs the package ray: {install_command('ray')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        "embed A B --model pixels --workers 2",
        "embed A B --model pixels --gpus 1",
        "label A B --centers C --cpus 2",
        "cluster A B --clusters 3 --memory 2",
    ],
)
def test_options_of_workers_on_ray_need_it(arguments):
    refuse(*arguments.split(), contains="--on ray")
