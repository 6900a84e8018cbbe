"""The work of a process in the clustering tests, in a module that spawned processes can import."""

import numpy as np
import torch.distributed as dist

from mlcd.clustering import kmeans as trainer
from mlcd.clustering.arithmetics import DEVICE
from mlcd.clustering.device_members import DeviceMembers
from mlcd.clustering.kmeans import check_equal
from mlcd.clustering.rows import ArrayRows
from mlcd.clustering.sums import mean_of
from mlcd.errors import Unavailable
from mlcd.types import unit_rows
from mlcd.world import World


def rows():
    return unit_rows(np.random.default_rng(0).standard_normal((2001, 10)))


def run(rank, size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{size}", rank=rank, world_size=size
    )
    world = World.current()
    flat = trainer.kmeans([rows()], 40, iterations=4, world=world)
    trainer.MANY_CLUSTERS = 50
    deep = trainer.kmeans([rows()], 60, iterations=2, world=world)
    shared = world.broadcast(rank)
    np.savez(
        f"{folder}/{size}-{rank}.npz",
        flat=flat.centers,
        sizes=flat.sizes,
        objective=flat.objective,
        assignment=flat.assignment,
        deep=deep.centers,
        mean=mean_of(ArrayRows([rows()]), world),
        shared=shared,
        refused=size > 1 and notices_a_difference(world),
    )
    dist.destroy_process_group()


def use_device(setattr_):
    """Makes k-means sum on a device, which is the CPU."""
    setattr_(trainer, "_MANY_CENTERS", 1)
    setattr_(trainer, "_DEVICE", "cpu")
    setattr_(trainer, "fastest_matmuls", lambda *_, **__: [DEVICE])


def run_on_device(rank, size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{size}", rank=rank, world_size=size
    )
    use_device(setattr)
    moved, passes, assign = [], [], DeviceMembers.assign
    DeviceMembers.assign = lambda self, centers: passes.append(1) or assign(self, centers)
    result = trainer.kmeans(
        [rows()],
        40,
        iterations=4,
        tolerance=0.0,
        world=World.current(),
        on_iteration=lambda progress: moved.append(progress.moved),
    )
    np.savez(
        f"{folder}/{size}-{rank}.npz",
        centers=result.centers,
        sizes=result.sizes,
        objective=result.objective,
        assignment=result.assignment,
        moved=moved,
        passes=len(passes),
    )
    dist.destroy_process_group()


def notices_a_difference(world):
    try:
        check_equal(world, np.full((3, 2), world.rank == world.size - 1, dtype=np.float32), 7)
    except Unavailable as error:
        return "after iteration 7" in str(error) and f"process {world.size - 1}" in str(error)
    return False
