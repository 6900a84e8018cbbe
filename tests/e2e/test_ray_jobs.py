"""`mlcd worker` with MLCD_JOBS__ENGINE=ray on a real Ray cluster: jobs as a local worker does them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import draft_path, open_artifact
from mlcd.encoders.hog import HogEncoder
from mlcd.errors import ConfigInvalid, MlcdError, Unavailable
from mlcd.parts.ray_session import RayOptions
from mlcd.pipelines.resolve import model_everywhere
from mlcd.pipelines.shard import Equipment
from mlcd.version import __version__
from service.jobs.job import JobSpec, Work
from service.jobs.roots import Roots
from service.jobs.service import open_queue
from service.settings import read_settings
from service.worker import ray_tasks
from service.worker.failures import EngineDown, Stopped, WorkerLost
from service.worker.loop import Worker
from service.worker.ray_tasks import RayRunner, TaskActor, settings_there
from service.worker.task import TaskRunner, Watch
from tests.conftest import write_digits
from tests.e2e.test_ray import SMALL, cluster_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

NUM_IMAGES, SHARD_IMAGES = 600, 40


@pytest.fixture(scope="module", autouse=True)
def quiet_ray():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    pytest.importorskip("ray", reason="needs the extra ray")


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(2) as made:
        yield made


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = write_digits(tmp_path_factory.mktemp("ray_jobs") / "images", NUM_IMAGES)
    (folder / "3" / "0003.png").write_bytes(b"no image")
    return folder


def given(folder, images, **jobs):
    return {
        "model": "hog",
        "state_dir": str(folder / "state"),
        "jobs": {
            "roots": (str(folder), str(images.parent)),
            "shard_images": SHARD_IMAGES,
            "lease_s": 4,
            **jobs,
        },
    }


class Setting:
    """One queue, and workers on it."""

    def __init__(self, folder, images):
        self.folder, self.images = folder, images
        self.queue = open_queue(read_settings(given(folder, images)))
        self.processes = []

    def start(self, engine, *more, environment=None):
        settings = {
            "MLCD_JOBS__ROOTS": f"{self.folder},{self.images.parent}",
            "MLCD_JOBS__SHARD_IMAGES": SHARD_IMAGES,
            "MLCD_JOBS__LEASE_S": 4,
            "MLCD_JOBS__ENGINE": engine,
        }
        command = (sys.executable, "-m", "mlcd", "worker", "--model", "hog")
        process = subprocess.Popen(
            [*command, "--state", str(self.folder / "state"), *more],
            env={**os.environ, **{name: str(each) for name, each in settings.items()}}
            | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def submit(self, name):
        spec = JobSpec(
            "embed",
            str(self.images),
            str(self.folder / name),
            fingerprint=HogEncoder().fingerprint,
        )
        return self.queue.submit(spec)[0].id


@pytest.fixture
def setting(tmp_path, images):
    made = Setting(tmp_path, images)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
        process.stdout.close()
    made.queue.close()


def done(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def until(condition, timeout_s=120.0):
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def alone(images, tmp_path_factory):
    """The embeddings that a local worker makes."""
    setting = Setting(tmp_path_factory.mktemp("alone"), images)
    job = setting.submit("out")
    with contextlib.closing(setting.queue):
        done(setting.start("workers", "--drain"))
        assert setting.queue.get(job).state == "succeeded"
    return open_artifact(setting.folder / "out")


def check_same(setting, job, alone):
    ended = setting.queue.get(job)
    assert (ended.state, ended.failed_items) == ("succeeded", 1)
    there = open_artifact(setting.folder / "out")
    assert (there.digest, there.summary) == (alone.digest, alone.summary)
    keys = EmbeddingsArtifact.open(there.path).keys
    assert len(keys) == len(set(keys)) == NUM_IMAGES - 1
    assert not draft_path(there.path).exists()


def leases(setting, job):
    return list(setting.queue._database.read(job).leases.values())


def test_a_job_on_ray_has_the_bytes_of_a_local_worker(cluster, setting, alone):
    job = setting.submit("out")
    worker = setting.start("ray", "--drain")
    until(lambda: len(leases(setting, job)) == 2)  # as many as Ray has workers
    done(worker)
    check_same(setting, job, alone)


def test_nodes_and_the_worker_itself_are_killed(cluster, setting, alone):
    job = setting.submit("out")
    worker = setting.start("ray")
    until(lambda: setting.queue.get(job).shards_done >= 2)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    cluster.add_node(wait=False, **SMALL)
    until(lambda: setting.queue.get(job).shards_done >= 5)
    worker.kill()
    worker.wait()
    assert setting.queue.get(job).state == "running"
    done(setting.start("ray", "--drain"))
    check_same(setting, job, alone)


def test_sigterm_ends_it_within_ten_seconds_and_counts_no_attempt(cluster, setting, alone):
    job = setting.submit("out")
    worker = setting.start("ray")
    until(lambda: len(leases(setting, job)) == 2 and setting.queue.get(job).stage == "shard")
    began_s = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    done(worker)
    assert time.monotonic() - began_s < 10
    assert not leases(setting, job)
    assert not any(setting.queue._database.read(job).attempts.values())
    done(setting.start("workers", "--drain"))  # and a local worker goes on with it
    check_same(setting, job, alone)


def test_a_canceled_job_leaves_nothing(cluster, setting):
    job = setting.submit("out")
    worker = setting.start("ray", "--drain")
    until(lambda: setting.queue.get(job).shards_done >= 1)
    setting.queue.cancel(job)
    done(worker)
    assert setting.queue.get(job).state == "canceled"
    assert list(setting.folder.glob("out*")) == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"MLCD_JOBS__RAY_ADDRESS": "ray://127.0.0.1:1"}, "cannot be reached"),
        ({"MLCD_JOBS__RAY_ADDRESS": "nowhere"}, "give ray, or ray://host:port"),
    ],
)
def test_a_wrong_address_is_one_line(setting, environment, said):
    worker = setting.start("ray", "--drain", environment=environment)
    output, _ = worker.communicate(timeout=120)
    assert worker.returncode in (1, 2)
    assert said in output
    assert "Traceback" not in output


# The contract of a `Runner`: one suite for that of this process and for that on Ray.


@pytest.fixture(params=["here", "ray"])
def runner(request, images, tmp_path):
    settings = read_settings(given(tmp_path, images, engine="ray"))
    equipment = Equipment(HogEncoder(), None, num_threads=1)
    roots = Roots(settings.jobs.roots)
    with ThreadPoolExecutor(1) as computing:
        here = TaskRunner(equipment, roots, shard_images=SHARD_IMAGES)
        if request.param == "here":
            yield here
            return
        import ray

        request.getfixturevalue("cluster")
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        options = RayOptions(workers=1)
        there = settings_there(settings, 1)
        made = RayRunner(ray, options, there, here, computing, print)
        try:
            yield made
        finally:
            made.close()
            ray.shutdown()


def task(images, tmp_path, stage="shard", shard=0, **changes):
    spec = JobSpec(
        "embed", str(images), str(tmp_path / "out"), fingerprint=HogEncoder().fingerprint
    )
    return Work("job", replace(spec, **changes), stage, shard, 1, f"lease-{stage}-{shard}")


def performed(runner, work, **watch):
    until(lambda: runner.has_room(0))
    return runner.perform(work, Watch(**{"until_s": time.monotonic() + 60} | watch))


def test_a_runner_plans_makes_and_publishes(runner, images, tmp_path, alone):
    planned = performed(runner, task(images, tmp_path, "plan", None))
    assert sum(planned.sizes) == NUM_IMAGES
    failed = [
        performed(runner, task(images, tmp_path, shard=shard)).failed_items
        for shard in range(len(planned.sizes))
    ]
    assert sum(failed) == 1
    assert not runner.has_room(1)
    performed(runner, task(images, tmp_path, "publish", None))
    runner.forget()
    assert open_artifact(tmp_path / "out").digest == alone.digest


def test_a_runner_stops_when_it_is_told(runner, images, tmp_path):
    performed(runner, task(images, tmp_path, "plan", None))
    with pytest.raises(Stopped):
        performed(runner, task(images, tmp_path), stop=True)
    with pytest.raises(Stopped):
        performed(runner, task(images, tmp_path), until_s=time.monotonic() - 1)
    assert performed(runner, task(images, tmp_path)).failed_items in (0, 1)


def test_a_runner_raises_the_error_of_a_task(runner, images, tmp_path):
    with pytest.raises(MlcdError) as error:  # nothing was begun there
        performed(runner, task(images, tmp_path))
    assert error.value.name == "output-gone"
    with pytest.raises(MlcdError) as error:
        performed(runner, task(images, tmp_path, output="/elsewhere/out"))
    assert error.value.name == "other-roots"
    performed(runner, task(images, tmp_path, "plan", None))
    assert performed(runner, task(images, tmp_path)).failed_items in (0, 1)


def test_a_worker_that_is_lost_is_replaced(cluster, images, tmp_path):
    import ray

    settings = read_settings(given(tmp_path, images, engine="ray"))
    here = TaskRunner(
        Equipment(HogEncoder(), None, num_threads=1),
        Roots(settings.jobs.roots),
        shard_images=SHARD_IMAGES,
    )
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    try:
        with ThreadPoolExecutor(1) as computing:
            runner = RayRunner(
                ray, RayOptions(workers=1), settings_there(settings, 1), here, computing, print
            )
            performed(runner, task(images, tmp_path, "plan", None))
            until(lambda: runner.has_room(0))
            (actor,) = runner._idle
            ray.kill(actor)
            # one that is lost while it is idle costs no attempt: another one takes the task
            until(lambda: runner.has_room(0))
            outcome = retried(lambda: performed(runner, task(images, tmp_path)))
            assert outcome.failed_items in (0, 1)
            until(lambda: runner.has_room(0))
            (actor,) = runner._idle
            with ThreadPoolExecutor(1) as killing:
                killing.submit(kill_soon, ray, actor)
                with pytest.raises(WorkerLost):
                    for shard in range(1, 15):
                        performed(runner, task(images, tmp_path, shard=shard))
            assert performed(runner, task(images, tmp_path)).failed_items in (0, 1)
            runner.close()
    finally:
        ray.shutdown()


def deadly_actor():
    """A worker that shard 2 ends, as a lack of memory does."""

    class DeadlyActor(TaskActor):
        def perform(self, work, seconds):
            if work.shard == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().perform(work, seconds)

    return DeadlyActor


def test_a_shard_that_ends_every_worker_is_poison_and_listed(
    cluster, setting, alone, images, monkeypatch
):
    import ray

    monkeypatch.setattr(ray_tasks, "TaskActor", deadly_actor())
    monkeypatch.setattr("service.jobs.transitions.FIRST_PAUSE_S", 0.1)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    settings = read_settings(given(setting.folder, images, engine="ray"))
    job = setting.submit("out")
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    try:
        with ThreadPoolExecutor(1) as computing, ThreadPoolExecutor(2) as threads:
            here = TaskRunner(
                Equipment(HogEncoder(), None, num_threads=1),
                Roots(settings.jobs.roots),
                shard_images=SHARD_IMAGES,
            )
            there = settings_there(settings, 1)
            runner = RayRunner(ray, RayOptions(workers=2), there, here, computing, print)
            Worker(setting.queue, runner, threads, name="w", lease_s=4.0, stall_s=300.0).run(
                drain=True
            )
            runner.close()
    finally:
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)
    ended = setting.queue.get(job)
    assert (ended.state, ended.shards_done, ended.shards_failed) == ("failed", 14, 1)
    (failure,) = setting.queue.failures(job, limit=9).failures
    assert (failure.shard, failure.problem.code) == (2, "worker-lost")
    setting.queue.retry(job)
    done(setting.start("ray", "--drain"))
    check_same(setting, job, alone)


def kill_soon(ray, actor):
    time.sleep(0.3)
    ray.kill(actor)


def retried(perform):
    try:
        return perform()
    except EngineDown:
        return perform()


def test_workers_get_no_secrets(tmp_path, images):
    settings = read_settings(
        given(tmp_path, images) | {"redis_url": "redis://:hidden-word@host:6379/0"}
    )
    there = settings_there(settings, 2)
    assert "hidden-word" not in there.model_dump_json()
    assert there.redis_url is None
    assert (there.engine_threads, there.decode_threads) == (2, 2)
    assert there.model == model_everywhere("hog") == "hog"
    assert issubclass(WorkerLost, Unavailable)
    assert not issubclass(WorkerLost, ConfigInvalid)


@pytest.mark.parametrize(("gpus", "seen"), [(0, ""), (0.5, "7")])
def test_a_worker_sees_gpus_only_where_it_has_some(gpus, seen, tmp_path, images, monkeypatch):
    """Ray leaves them in sight of every worker."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    settings = read_settings(given(tmp_path, images, engine="ray", ray_gpus=gpus))
    TaskActor(settings_there(settings, 1), 1).open(__version__)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
