"""The work of a process in the distributed evaluation tests, in a module that they can import."""

import torch
import torch.distributed as dist

from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig
from mlcd.training.config import validate_config
from mlcd.training.evaluation.knn import knn
from mlcd.training.evaluation.linear_probe import linear_probe
from mlcd.training.evaluation.representations import ImageSet, PreparedImages, encode_images
from mlcd.training.evaluation.while_training import check_evaluation, evaluate_model
from mlcd.world import World


def model(seed=0):
    """An untrained tower for 16 px that has a projection."""
    trunk = ViT(
        ViTConfig(
            image_size=16, patch_size=8, width=32, depth=1, heads=2, mlp_width=64, embedding_dim=16
        )
    )
    trunk.initialize(torch.Generator().manual_seed(seed))
    return Servable(trunk, PreprocessSpec(resize_shortest=16, crop=16))


def run_config(trained_on, **evaluation):
    """A run on the images at `trained_on` that evaluates every 10 steps; its labels are of no
    account here.
    """
    return validate_config(
        {
            "out": "run",
            "data": {"images": str(trained_on), "labels": "labels"},
            "model": {
                "image_size": 16,
                "patch_size": 8,
                "width": 32,
                "depth": 1,
                "heads": 2,
                "mlp_width": 64,
                "embedding_dim": 16,
            },
            "schedule": {"steps": 30},
            "optim": {"warmup_steps": 5},
            "evaluation": {"every_steps": 10, **evaluation},
        }
    )


def prepared(images):
    return PreparedImages(
        ImageSet.of(open_source(str(images))), PreprocessSpec(resize_shortest=16, crop=16)
    )


def measure(world, images):
    """Rows, k-NN both ways, and what a run would log."""
    samples = encode_images(model(), prepared(images), features="pooled", world=world)
    config = run_config(images, linear_probe=True)
    return {
        "rows": torch.from_numpy(samples.rows),
        "keys": list(samples.keys),
        "splits": samples.splits.tolist(),
        "knn": dict(knn(samples, neighbors=5, hold_out=0.2, world=world)),
        "leave-one-out": dict(knn(samples, neighbors=5, hold_out=0.0, world=world)),
        "while training": evaluate_model(
            model(), config, world=world, images=check_evaluation(config)
        ),
    }


def evaluate(rank, size, folder, images):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{size}", rank=rank, world_size=size
    )
    torch.save(measure(World.current(), images), f"{folder}/evaluation-{size}-{rank}.pt")
    dist.destroy_process_group()


def probe(rank, size, folder, samples):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{size}", rank=rank, world_size=size
    )
    measured = dict(linear_probe(samples, hold_out=0.2, metric="accuracy", world=World.current()))
    torch.save(measured, f"{folder}/probe-{size}-{rank}.pt")
    dist.destroy_process_group()
