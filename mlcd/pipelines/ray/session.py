"""The connection to a Ray cluster, and the resources that each worker requests from it."""

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
    """The cluster and the workers that a command uses on it.

    address: `ray` for the cluster that Ray itself finds (RAY_ADDRESS, then one on this machine,
    else Ray starts one on this machine), or ray://HOST:PORT. workers: number of workers; None for
    as many as fit. cpus, gpus, memory_gib: resources of one worker; memory_gib None for its share
    of the cluster's memory.
    """

    address: str = NEAREST
    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float | None = None

    @property
    def num_threads(self) -> int:
        """The number of threads of one worker."""
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
        """The message for the user if no worker starts."""
        memory = "" if self.memory_gib is None else f" and {self.memory_gib:g} GiB"
        return (
            f"no worker of {self.cpus:g} CPUs, {self.gpus:g} GPUs{memory} has started yet; the"
            " cluster may be full (`ray status`)"
        )

    def num_workers(self, resources: dict[str, float]) -> int:
        """Returns the number of workers for a cluster of these resources."""
        if self.workers is not None:
            return self.workers
        demand = {"CPU": self.cpus, "GPU": self.gpus, "memory": int((self.memory_gib or 0) * _GIB)}
        return max(1, min(int(resources.get(k, 0) / least) for k, least in demand.items() if least))

    def memory_bytes(self, resources: dict[str, float]) -> float:
        """Returns the bytes of memory of one worker: as requested, or in proportion to its CPUs."""
        if self.memory_gib is not None:
            return self.memory_gib * _GIB
        share = self.cpus / max(self.cpus, resources.get("CPU", 0))
        return resources.get("memory", 0) * share or _GIB


def centers_at_once(num: int, center_bytes: int, memory_bytes: float) -> int:
    """Returns how many of `num` centers fit in half of a worker's memory."""
    fit = int(memory_bytes / 2 / center_bytes)
    return min(num, max(_LEAST_CENTERS, fit))


def check_address(address: str) -> str:
    """Returns the address. Raises ConfigInvalid unless it names a cluster."""
    host, _, port = address.removeprefix(_ADDRESS).rpartition(":")
    if address != NEAREST and not (address.startswith(_ADDRESS) and host and port.isdecimal()):
        raise ConfigInvalid(f"a cluster must be ray or ray://HOST:PORT, got {address}")
    return address


def raise_cause(cause: Exception) -> NoReturn:
    """Raises the error of a call on the cluster; an MlcdError is raised unchanged."""
    if isinstance(cause, MlcdError):
        raise cause
    raise RuntimeError("a worker on Ray failed") from cause


def check_version(driver_version: str) -> None:
    """Raises ConfigInvalid if this node's version of mlcd differs from the driver's, because its
    parts might have other bytes.
    """
    if driver_version != __version__:
        raise ConfigInvalid(
            f"a node of the Ray cluster has mlcd {__version__}, and the driver {driver_version}",
            remedy="install one version on all of them",
        )


def hide_gpus(num: float) -> None:
    """Hides this machine's GPUs from this process if `num`, the GPUs of one worker, is 0. Ray
    leaves the GPUs visible to such a worker, and an engine would use one.
    """
    if num == 0:
        os.environ[_VISIBLE] = ""  # noqa: TID251 - where CUDA reads it


@contextmanager
def gpus_hidden(num: float) -> Iterator[None]:
    """Hides the GPUs, as `hide_gpus` does, within the block."""
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
    """Raises ConfigInvalid if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigInvalid("--on ray needs the package ray", remedy=install_command("ray"))


@contextmanager
def ray_session(address: str) -> Iterator[Any]:
    """Connects to the cluster and yields the module `ray`; everything started on it ends with
    the block. Raises Unavailable if the cluster is unreachable.
    """
    require_ray()
    # Ray reports usage to its vendor unless the user's environment forbids it before the import.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # noqa: TID251
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with warnings.catch_warnings(action="ignore"):
            ray.init(None if address == NEAREST else address, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise Unavailable(
            f"the Ray cluster {address} cannot be reached ({str(error).splitlines()[0]})",
            remedy="check `ray status` on the cluster; `ray stop` here, if this machine still"
            " refers to a stopped cluster; a cluster that requires a token needs"
            " RAY_AUTH_MODE=token; both sides need one version of Ray",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
