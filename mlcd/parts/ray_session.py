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

NEAREST: Final = "ray"
_ADDRESS: Final = "ray://"


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The cluster and the workers that a command has there.

    address: `ray` for the cluster that Ray itself finds (RAY_ADDRESS, then one on this machine,
    else one of this machine alone is started), or ray://HOST:PORT. workers: None for as many as
    there is room for. cpus, gpus: those of one worker.
    """

    address: str = NEAREST
    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def num_threads(self) -> int:
        """The threads of one worker."""
        return max(1, int(self.cpus))

    @property
    def demand(self) -> dict[str, float]:
        """The resources of one worker, by Ray's names of its options."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}

    def num_workers(self, resources: dict[str, float]) -> int:
        """Returns the number of workers for a cluster of these resources."""
        if self.workers is not None:
            return self.workers
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return max(1, min(int(resources.get(k, 0) / each) for k, each in wanted.items() if each))


def check_address(address: str) -> str:
    """Returns the address. Raises ConfigInvalid where it names no cluster."""
    host, _, port = address.removeprefix(_ADDRESS).rpartition(":")
    if address != NEAREST and not (address.startswith(_ADDRESS) and host and port.isdecimal()):
        raise ConfigInvalid(f"{address} is no cluster", remedy="give ray, or ray://HOST:PORT")
    return address


def raise_cause(cause: Exception) -> NoReturn:
    """Raises the error of a call on the cluster: one for the user as it is."""
    if isinstance(cause, MlcdError):
        raise cause
    raise RuntimeError("a worker on Ray failed") from cause


def require_ray() -> None:
    """Raises ConfigInvalid where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigInvalid("--on ray needs the package ray", remedy="pip install 'mlcd[ray]'")


@contextmanager
def ray_session(address: str) -> Iterator[Any]:
    """Connects to the cluster and yields the module `ray`; all that was started ends with the
    block. Raises Unavailable where there is no such cluster.
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
