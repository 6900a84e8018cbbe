"""The size of the first study: model, steps, clusters, seeds, evaluation images."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tier:
    """All that decides a run's result besides arm, seed and setting.

    overrides: changes of the recipe `small`. encoder: an .onnx file below the data directory, or a
    built-in encoder's name. num_threads: those of each run; with it and its seed a run is
    bit-identical on one kind of CPU. tune_steps 0: every arm takes its default setting. instances:
    also instance discrimination, at twice the cost of a step. known_per_class, test_per_class: caps
    by hash of the key.
    """

    name: str
    shards: str
    encoder: str
    overrides: tuple[str, ...]
    image_size: int
    clusters: int
    steps: int
    tune_steps: int
    seeds: tuple[int, ...]
    sweeps: bool
    references: bool
    instances: bool
    num_threads: int
    device: str = "cpu"
    tune_seed: int = 0
    known_per_class: int = 100
    test_per_class: int = 50
    pretrain_known_per_class: int = 150
    pretrain_test_per_class: int = 40
    fashion_known_per_gender: int = 10_000
    fashion_test_per_gender: int = 10_000
    stored_labels: int = 32
    checkpoint_steps: int = 200


MOBILENET: Final = "encoders/mobilenet_v2_imagenet/mobilenet_v2_1.0_224.onnx"
_ALL_SHARDS: Final = "tiny_imagenet_pretrain/pretrain-*.tar"

TIERS: Final = {
    tier.name: tier
    for tier in (
        Tier(
            name="toy",  # takes seconds; the tests run it
            shards="tiny_imagenet_pretrain/pretrain-0000.tar",
            encoder="pixels",
            overrides=(
                "model.image_size=16",
                "model.patch_size=8",
                "model.width=32",
                "model.depth=1",
                "model.heads=2",
                "model.mlp_width=64",
                "model.embedding_dim=16",
                "schedule.batch_size=64",
                "optim.warmup_steps=5",
            ),
            image_size=16,
            clusters=30,
            steps=12,
            tune_steps=0,
            seeds=(1, 2),
            sweeps=False,
            references=False,
            instances=True,
            num_threads=1,
            known_per_class=12,
            test_per_class=4,
            pretrain_known_per_class=10,
            pretrain_test_per_class=3,
            fashion_known_per_gender=60,
            fashion_test_per_gender=15,
            stored_labels=10,
            checkpoint_steps=6,
        ),
        Tier(
            name="cpu",  # the reported one: a night on 2 cores
            shards=_ALL_SHARDS,
            encoder=MOBILENET,
            overrides=(),
            image_size=64,
            clusters=1000,
            steps=480,
            tune_steps=240,
            seeds=(1, 2, 3, 4),
            sweeps=True,
            references=True,
            instances=True,
            num_threads=1,
        ),
    )
}
