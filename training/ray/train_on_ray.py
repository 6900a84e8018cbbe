"""Training on a Ray cluster, where a worker takes the place of a torchrun process.

Ray Train places the workers, connects their process group, and after the loss of a worker restarts
them on the rest of the cluster. The only state is the run's directory, on a shared disk: Ray stores
no checkpoint.
"""

import glob
import os
import secrets
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from mlcd.artifacts.manifest import Artifact, open_artifact
from mlcd.errors import ConfigInvalid, InvalidInput, MlcdError, Unavailable
from mlcd.extras import install_command
from mlcd.locations import is_url
from mlcd.pipelines.ray.session import RayOptions, ray_session
from mlcd.progress import Reporter, Stages
from mlcd.training.config import RunConfig
from mlcd.training.pairs.pairs_config import PairsConfig, validate_any
from mlcd.training.preemption import Interrupted, Preempted, Signals, receive_signals, use_signals
from mlcd.training.ray.run_monitor import MonitoredStages, News, RunDisplay, RunMonitor
from mlcd.training.run.classification import OpenEvaluation, open_no_evaluation
from mlcd.training.run.run_pairs import run_pairs
from mlcd.training.run.run_training import run_training
from mlcd.world import ReportedElsewhere, World

_POLL_S: Final = 0.5
_TIMEOUT_S: Final = 300  # of collectives and barriers, as under torchrun
_GROW_S: Final = 600.0  # interval at which workers restart if there is room for more of them
_MARKER: Final = ".{}-{}.shared"
_ARTIFACTS: Final = ("labels", "selection", "centers")
_PATH_FIELDS: Final = ("images", "labels", "selection", "centers", "pairs", "embeddings")


def train_on_ray(
    config: RunConfig | PairsConfig,
    options: RayOptions,
    reporter: Reporter,
    announce: Callable[[str], None],
    *,
    open_evaluation: OpenEvaluation = open_no_evaluation,
) -> Artifact:
    """Trains like `run_training` or `run_pairs`, with workers on Ray.

    Raises a worker's error; Preempted or Interrupted after a signal, when a checkpoint is saved;
    Unavailable if workers are lost repeatedly.
    """
    _check(config, options)
    fields = _make_absolute(config)
    _check_artifacts(fields)
    out = Path(fields["out"])
    with _create_marker(out) as marker_path, ray_session(options.address) as ray:
        this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        on_this_node = {"num_cpus": 0, "scheduling_strategy": this_node}
        monitor = ray.remote(**on_this_node)(RunMonitor).remote()
        work = _Work(fields, options.num_threads, str(marker_path), monitor, open_evaluation)
        workers = options.num_workers(ray.cluster_resources())
        fit = ray.remote(max_retries=0, **on_this_node)(_fit).remote(work, options, workers)
        try:
            news = _watch(ray, fit, monitor, options, reporter, announce)
        except (ray.exceptions.RayTaskError, ray.exceptions.ActorDiedError) as error:
            raise ConfigInvalid(
                f"the cluster cannot run this training ({_last_line(error)})",
                remedy="every node needs this version of mlcd with the extras ray and train, and"
                " `ray status` may say more",
            ) from error
        except ray.exceptions.RayError as error:
            raise Unavailable(
                f"the Ray cluster is unreachable ({_last_line(error)})",
                remedy="the last checkpoint is intact: run the same command again to resume",
            ) from error
    _raise_outcome(news)
    run = open_artifact(out, "run", verify_files=False)
    for leftover in out.parent.glob(_MARKER.format(glob.escape(out.name), "*")):
        leftover.unlink(missing_ok=True)  # of killed drivers
    return run


@dataclass(frozen=True)
class _Work:
    """The work of each worker, pickled by Ray. cores: CPU cores of one worker."""

    fields: dict[str, Any]
    cores: int
    marker_path: str
    monitor: Any
    open_evaluation: OpenEvaluation


def _check(config: RunConfig | PairsConfig, options: RayOptions) -> None:
    for package in ("pandas", "requests"):
        if find_spec(package) is None:
            raise ConfigInvalid(
                f"training on Ray requires the package {package}", remedy=install_command("ray")
            )
    if options.gpus not in (0, 1):
        raise ConfigInvalid(
            f"--gpus must be 0 or 1 for training, got {options.gpus:g}", remedy="give --gpus 1 or 0"
        )
    if config.device == "cuda" and not options.gpus:
        raise ConfigInvalid("device=cuda requires workers with a GPU", remedy="give --gpus 1")
    if config.device == "cpu" and options.gpus:
        raise ConfigInvalid(
            "device=cpu leaves the workers' GPUs idle",
            remedy="leave out --gpus, or set device=auto",
        )


def _make_absolute(config: RunConfig | PairsConfig) -> dict[str, Any]:
    """Returns the config's fields with absolute paths, for all machines with the shared disk."""
    fields = config.model_dump(mode="json")
    fields["out"] = str(Path(config.out).absolute())
    text = fields.get("text") or {}
    for section in (*_data_sections(fields), fields.get("evaluation") or {}):
        for name in _PATH_FIELDS:
            path = section.get(name)
            if isinstance(path, str) and not is_url(path):
                section[name] = str(Path(path).absolute())
    for section, name in ((fields["model"], "start"), (text, "start"), (text, "tokenizer")):
        path = section.get(name)  # or a name, such as hub:ORGANIZATION/MODEL
        if isinstance(path, str) and Path(path).exists():
            section[name] = str(Path(path).absolute())
    return fields


def _data_sections(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [fields["data"], *(fields["data"].get("mix") or ())]


def _check_artifacts(fields: dict[str, Any]) -> None:
    """Raises for a missing artifact before any worker starts."""
    for section in _data_sections(fields):
        for kind in _ARTIFACTS:
            path = section.get(kind)
            if path is not None and not is_url(path):
                open_artifact(Path(path), kind, verify_files=False)


@contextmanager
def _create_marker(out: Path) -> Iterator[Path]:
    """Yields an empty file beside `out`, by which workers check that they share its disk."""
    marker = out.with_name(_MARKER.format(out.name, secrets.token_hex(4)))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise InvalidInput(
            f"{out} cannot be created ({error.strerror})", remedy="give a writable output"
        ) from error
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def _watch(
    ray: Any,
    fit: Any,
    monitor: Any,
    options: RayOptions,
    reporter: Stages,
    announce: Callable[[str], None],
) -> News:
    """Shows the workers' progress until they stop, and returns their last news.

    The first signal makes them save a checkpoint and stop; the next signal ends the driver at once.
    """
    room = f"{options.cpus:g} CPUs and {options.gpus:g} GPUs"
    with RunDisplay(reporter, announce, room) as display:

        def poll(timeout_s: float) -> bool:
            done, _ = ray.wait([fit], timeout=timeout_s)
            display.show(ray.get(monitor.news.remote()))
            return bool(done)

        with receive_signals() as signals:
            ended = poll(0)
            while not (ended or signals.interrupted or signals.preempted):
                ended = poll(_POLL_S)
        if not ended:
            # Other stages store finished work at once and need no checkpoint.
            if not display.is_training:
                raise Preempted(None) if signals.preempted else Interrupted
            ray.get(monitor.end.remote("preempted" if signals.preempted else "interrupted"))
            while not poll(_POLL_S):
                pass
    failure = ray.get(fit)
    news: News = ray.get(monitor.news.remote())
    if failure is not None and not (news.error or news.bug or news.lost):
        raise RuntimeError(failure)
    if news.ended:
        raise Preempted(news.step) if signals.preempted else Interrupted
    return news


def _last_line(error: Exception) -> str:
    """Returns the last line of a Ray error, which is the message; a traceback comes before it."""
    return str(error).strip().rpartition("\n")[2].strip()


def _raise_outcome(news: News) -> None:
    error = news.error
    if error is not None and news.is_final:
        raise error
    if news.bug is not None:
        raise RuntimeError(f"a worker on Ray failed:\n{news.bug}")
    if news.lost:
        reason = "" if error is None else f" ({error.message})"
        raise Unavailable(
            f"the workers on Ray were lost over and over, the last time after {news.done} steps"
            + reason,
            remedy="a node may have run out of memory: raise --cpus (CPUs per worker), which puts"
            " fewer workers on each node, then run the same command again to resume from the last"
            " checkpoint",
        )


def _fit(work: _Work, options: RayOptions, num_workers: int) -> str | None:
    """Runs the training, on the driver's node; returns Ray's error if Ray itself gave up."""
    from ray.train import (
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
        TrainingFailedError,
    )
    from ray.train.torch import TorchConfig, TorchTrainer

    gpus = int(options.gpus)
    with tempfile.TemporaryDirectory() as folder:  # for Ray's own files
        trainer = TorchTrainer(
            _train_worker,
            train_loop_config={"work": work},
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=_TIMEOUT_S
            ),
            scaling_config=ScalingConfig(
                num_workers=(1, num_workers),
                use_gpu=bool(gpus),
                resources_per_worker={"CPU": options.cpus, "GPU": gpus},
                elastic_resize_monitor_interval_s=_GROW_S,
            ),
            run_config=RunConfig(
                storage_path=folder,
                failure_config=FailureConfig(max_failures=-1),
                worker_runtime_env={"env_vars": {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}},
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            return str(error)
    return None


def _train_worker(settings: dict[str, Any]) -> None:
    """Trains as one process of the group that Ray has connected.

    An error that is raised makes Ray restart the workers; a final error is sent to the monitor, and
    not raised.
    """
    import ray

    work: _Work = settings["work"]
    world = World.current()
    may_start = world.rank == 0 and ray.get(work.monitor.begin.remote(world.size))
    if not world.broadcast(may_start) or not _is_shared(work, world, ray):
        return
    signals = Signals()
    stages: Stages = Reporter("silent")
    if world.rank == 0:
        stages = MonitoredStages(ray, work.monitor, signals)
    try:
        with use_signals(signals):
            _run(work, stages)
    except Interrupted as end:
        if world.rank == 0:
            ray.get(work.monitor.report_stop.remote(getattr(end, "step", None)))
    except ReportedElsewhere:
        return
    except MlcdError as error:
        if not ray.get(work.monitor.fail.remote(error, is_final=not _may_be_temporary(error))):
            raise
    except Exception:
        ray.get(work.monitor.fail_unexpectedly.remote(traceback.format_exc()))
        raise


def _is_shared(work: _Work, world: World, ray: Any) -> bool:
    """Returns True if all workers see the disk of the run; otherwise reports a final error."""
    is_missing = not Path(work.marker_path).exists()
    if is_missing:
        error = InvalidInput(
            f"{os.uname().nodename} cannot read the disk of {work.fields['out']}",
            remedy="give a path on a disk that every node and this machine mount at the same path",
        )
        ray.get(work.monitor.fail.remote(error, is_final=True))
    return not int(world.max(torch.tensor(int(is_missing))))


def _may_be_temporary(error: MlcdError) -> bool:
    """Returns True for an error that a restart may fix: a lost worker, or a lock."""
    return isinstance(error, Unavailable) or isinstance(error.__cause__, BlockingIOError)


def _run(work: _Work, stages: Stages) -> None:
    config = validate_any(work.fields)
    if isinstance(config, PairsConfig):
        run_pairs(config, stages, cores=work.cores)
    else:
        run_training(config, stages, cores=work.cores, open_evaluation=work.open_evaluation)
