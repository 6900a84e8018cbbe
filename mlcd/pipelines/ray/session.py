"""The connection to a Ray cluster, and what each of our workers takes of it."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, NoReturn

from mlcd.errors import ConfigInvalid, MlcdError, Unavailable
from mlcd.extras import install_command
from mlcd.version import __version__

NEAREST: Final = "ray"
_ADDRESS: Final = "ray://"
_GIB: Final = 1 << 30
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_LEAST_CENTERS = 256  # of a block: with fewer, a call costs more than its work


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The cluster and the workers that a command has there.

    address: `ray` for the cluster that Ray itself finds (RAY_ADDRESS, then one on this machine,
    else one of this machine alone is started), or ray://HOST:PORT. workers: None for as many as
    there is room for. cpus, gpus, memory_gib: those of one worker; None for its share of the
    cluster's memory.
    """

    address: str = NEAREST
    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float | None = None

    @property
    def num_threads(self) -> int:
        """The threads of one worker."""
        return max(1, int(self.cpus))

    @property
    def demand(self) -> dict[str, float]:
        """The resources of one worker, by Ray's names of its options."""
        demand = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        return (
            demand if self.memory_gib is None else demand | {"memory": int(self.memory_gib * _GIB)}
        )

    @property
    def no_room(self) -> str:
        """The line for people where no worker begins."""
        memory = "" if self.memory_gib is None else f" and {self.memory_gib:g} GiB"
        return (
            f"no worker of {self.cpus:g} CPUs, {self.gpus:g} GPUs{memory} has begun yet; the"
            " cluster may be full (`ray status`)"
        )

    def num_workers(self, resources: dict[str, float]) -> int:
        """Returns the number of workers for a cluster of these resources."""
        if self.workers is not None:
            return self.workers
        demand = {"CPU": self.cpus, "GPU": self.gpus, "memory": int((self.memory_gib or 0) * _GIB)}
        return max(1, min(int(resources.get(k, 0) / least) for k, least in demand.items() if least))

    def memory_bytes(self, resources: dict[str, float]) -> float:
        """Returns the memory of one worker: what was asked for, or its share by its CPUs."""
        if self.memory_gib is not None:
            return self.memory_gib * _GIB
        share = self.cpus / max(self.cpus, resources.get("CPU", 0))
        return resources.get("memory", 0) * share or _GIB


def centers_at_once(num: int, center_bytes: int, memory_bytes: float) -> int:
    """Returns how many of `num` centers a worker holds at once: half of its memory is for them."""
    fit = int(memory_bytes / 2 / center_bytes)
    return min(num, max(_LEAST_CENTERS, fit))


def check_address(address: str) -> str:
    """Returns the address. Raises ConfigInvalid unless it names a cluster."""
    host, _, port = address.removeprefix(_ADDRESS).rpartition(":")
    if address != NEAREST and not (address.startswith(_ADDRESS) and host and port.isdecimal()):
        raise ConfigInvalid(f"a cluster must be ray or ray://HOST:PORT, got {address}")
    return address


def raise_cause(cause: Exception) -> NoReturn:
    """Raises the error of a call on the cluster: one for the user as it is."""
    if isinstance(cause, MlcdError):
        raise cause
    raise RuntimeError("a worker on Ray failed") from cause


def check_version(of_driver: str) -> None:
    """Raises ConfigInvalid where this node has another version of mlcd than the driver: its parts
    need not have the same bytes.
    """
    if of_driver != __version__:
        raise ConfigInvalid(
            f"a node of the Ray cluster has mlcd {__version__}, and the driver {of_driver}",
            remedy="install one version on all of them",
        )


def hide_gpus(num: float) -> None:
    """Hides this machine's GPUs from this process where `num`, the GPUs of one worker, is 0. Ray
    leaves them in sight of such a worker, and an engine would take one.
    """
    if num == 0:
        os.environ[_VISIBLE] = ""  # noqa: TID251 - where CUDA reads it


@contextmanager
def gpus_hidden(num: float) -> Iterator[None]:
    """Hides them, as `hide_gpus` does, within the block."""
    environment = os.environ  # noqa: TID251 - where CUDA reads it
    before = environment.get(_VISIBLE)
    hide_gpus(num)
    try:
        yield
    finally:
        environment.pop(_VISIBLE, None)
        if before is not None:
            environment[_VISIBLE] = before


def require_ray() -> None:
    """Raises ConfigInvalid where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigInvalid("--on ray needs the package ray", remedy=install_command("ray"))


@contextmanager
def ray_session(address: str) -> Iterator[Any]:
    """Connects to the cluster and yields the module `ray`; everything started on it ends with
    the block. Raises Unavailable where the cluster cannot be reached.
    """
    require_ray()
    # Ray reports its use to its maker unless the user's environment forbids it before the import.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # noqa: TID251
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with warnings.catch_warnings(action="ignore"):
            ray.init(None if address == NEAREST else address, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise Unavailable(
            f"the Ray cluster {address} cannot be reached ({str(error).splitlines()[0]})",
            remedy="see `ray status` there; `ray stop` here forgets one that is gone; one that asks"
            " for a token needs RAY_AUTH_MODE=token; both sides need one version of Ray",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
