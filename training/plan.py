"""The cost of a training run, estimated before it starts: memory, arithmetic, time, disk.

Nothing is trained or written, and no GPU is needed. Memory counts tensors only; allocators take
about 10 % more, and libraries add their own workspaces. Time excludes evaluation, checkpoints and
waiting for data.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil
from typing import Any, Final

import torch

from mlcd.errors import ConfigInvalid
from mlcd.training.byte_counts import (
    Memory,
    checkpoint_bytes,
    num_parameters,
    snapshot_bytes,
    step_memory,
)
from mlcd.training.config import RunConfig, load_config
from mlcd.training.data.dataset import label_tables, open_dataset
from mlcd.training.flops import head_flops, micro_batch, step_flops
from mlcd.training.run.classification import OpenEvaluation, open_no_evaluation
from mlcd.training.run.run_training import check_labels, check_run
from mlcd.training.telemetry.throughput import measure_peak_tflops

# The assumed share of the peak matrix throughput (MFU). NeMo reaches 0.45 (A100) and 0.29 (H100)
# for ViT g/14.
UTILIZATION: Final = 0.4

_UNKNOWN: Final = "UNKNOWN"
_PLACEHOLDER_PATHS: Final = {"out": _UNKNOWN, "data": {"images": _UNKNOWN, "labels": _UNKNOWN}}


@dataclass(frozen=True)
class DeviceProfile:
    """The peak matrix throughput of a device, and the share of it that a run reaches.

    peak_tflops: for one process's device at the run's precision. source: where that number comes
    from.
    """

    peak_tflops: float
    source: str = "given"
    utilization: float = UTILIZATION


@dataclass(frozen=True)
class TrainingPlan:
    """The estimated cost of a run.

    flops_per_image: forward and backward. head_share: share of these FLOPs for the class centers.
    checkpoints: number of checkpoints kept at the end. snapshot_bytes: memory on process 0's host
    while a checkpoint is written.
    """

    num_classes: int
    num_samples: int
    processes: int
    parameters: int
    embedding_dim: int
    steps: int
    batch_size: int
    images_at_once: int
    memory: Memory
    flops_per_image: float
    head_share: float
    device: DeviceProfile
    checkpoint_bytes: int
    checkpoints: int
    snapshot_bytes: int

    @property
    def epochs(self) -> float:
        return self.steps * self.batch_size / self.num_samples

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_image * self.batch_size

    @property
    def flops(self) -> float:
        return self.flops_per_step * self.steps

    @property
    def images_per_s(self) -> float:
        """Returns the images per second of all processes."""
        achieved = self.device.peak_tflops * 1e12 * self.device.utilization
        return self.processes * achieved / self.flops_per_image

    @property
    def seconds(self) -> float:
        return self.steps * self.batch_size / self.images_per_s

    @property
    def disk_bytes(self) -> int:
        """Returns the bytes of all kept checkpoints; writing one temporarily takes one more."""
        return self.checkpoints * self.checkpoint_bytes

    def facts(self) -> dict[str, Any]:
        """Returns the plan as JSON fields."""
        derived = ("epochs", "flops_per_step", "flops", "images_per_s", "seconds", "disk_bytes")
        fields = asdict(self) | {name: getattr(self, name) for name in derived}
        fields["memory"]["total"] = self.memory.total
        return fields

    def __str__(self) -> str:
        memory, peak = self.memory, self.device.peak_tflops
        where = (
            "in one process" if self.processes == 1 else f"in each of {self.processes} processes"
        )
        rows = [
            (
                "model",
                (
                    f"{self.parameters / 1e6:.1f} M weights, {self.num_classes} centers of "
                    f"{self.embedding_dim}"
                ),
            ),
            ("memory", f"{_size(memory.total)} {where}, at the peak"),
            ("", f"{_size(memory.backbone):>9}  weights, gradients and moments"),
            ("", f"{_size(memory.backbone_copies):>9}  copies of weights and gradients"),
            ("", f"{_size(memory.centers):>9}  class centers and moments"),
            ("", f"{_size(memory.center_gradient):>9}  gradient of the centers"),
            ("", f"{_size(memory.activations):>9}  activations of {self.images_at_once} images"),
            ("", f"{_size(memory.head):>9}  embeddings of all processes, and logits"),
            ("", f"{_size(memory.update):>9}  the update, when activations are gone"),
            (
                "length",
                (
                    f"{self.steps} steps of {self.batch_size}: {self.epochs:.3g} epochs of "
                    f"{self.num_samples} images"
                ),
            ),
            (
                "arithmetic",
                (
                    f"{self.flops_per_image / 1e9:.4g} GFLOP an image, {100 * self.head_share:.1f} "
                    "% by the centers"
                ),
            ),
            ("", f"{self.flops_per_step:.3g} FLOP a step, {self.flops:.3g} in all"),
            (
                "time",
                f"{timedelta(seconds=ceil(self.seconds))}, {self.images_per_s:.4g} images a second",
            ),
            (
                "",
                (
                    f"at {100 * self.device.utilization:.0f} % of {peak:.3g} TFLOP/s a process, "
                    f"{self.device.source}"
                ),
            ),
            (
                "checkpoint",
                (
                    f"{_size(self.checkpoint_bytes)}, {self.checkpoints} kept: "
                    f"{_size(self.disk_bytes)} of disk"
                ),
            ),
        ]
        return "\n".join(f"{name:<11}{text}" for name, text in rows)


def plan_training(
    config: RunConfig, num_classes: int, num_samples: int, world_size: int, device: DeviceProfile
) -> TrainingPlan:
    """Estimates the cost of `config`.

    num_samples: training samples of all data sets, without held-out ones. Raises ConfigInvalid if a
    micro-batch has fewer images than there are processes, or no class is left as a negative.
    """
    labels, micro_batch_size = config.loss.num_labels, micro_batch(config)
    if labels >= num_classes:
        raise ConfigInvalid(
            f"{labels} labels per image leave no negative among {num_classes} centers",
            remedy="lower loss.labels_per_image or cluster into more centers",
        )
    if config.schedule.batch_size // config.compute.accumulation < world_size:
        raise ConfigInvalid(
            f"a micro-batch needs at least one image for each of {world_size} processes, got "
            f"schedule.batch_size={config.schedule.batch_size} with compute.accumulation="
            f"{config.compute.accumulation}",
            remedy="raise schedule.batch_size, or lower compute.accumulation",
        )
    parameters = num_parameters(config)
    flops_per_image = step_flops(config, num_classes)
    return TrainingPlan(
        num_classes=num_classes,
        num_samples=num_samples,
        processes=world_size,
        parameters=parameters,
        embedding_dim=config.model.output_dim,
        steps=config.schedule.steps,
        batch_size=config.schedule.batch_size,
        images_at_once=-(-micro_batch_size // world_size),
        memory=step_memory(config, num_classes, world_size),
        flops_per_image=flops_per_image,
        head_share=head_flops(config, num_classes) / flops_per_image,
        device=device,
        checkpoint_bytes=checkpoint_bytes(config, num_classes),
        checkpoints=len(list_checkpoints(config)),
        snapshot_bytes=snapshot_bytes(config, num_classes, world_size),
    )


def plan_recipe(
    recipe: str,
    overrides: Sequence[str],
    *,
    num_classes: int | None = None,
    num_samples: int | None = None,
    world_size: int = 1,
    peak_tflops: float | None = None,
    utilization: float = UTILIZATION,
    open_evaluation: OpenEvaluation = open_no_evaluation,
) -> TrainingPlan:
    """Estimates the cost of a recipe.

    Arguments that are None are read from the data or measured on this machine. If both num_classes
    and num_samples are given, the data and `out` need not be set or exist. Raises the errors that
    the run itself would raise before its first step.
    """
    config = load_config(recipe, overrides, fallback=_PLACEHOLDER_PATHS)
    classes, samples = plan_inputs(config, num_classes, num_samples, open_evaluation)
    device = _device_profile(config, peak_tflops or config.telemetry.peak_tflops, utilization)
    return plan_training(config, classes, samples, world_size, device)


def _device_profile(
    config: RunConfig, peak_tflops: float | None, utilization: float
) -> DeviceProfile:
    if peak_tflops is not None:
        return DeviceProfile(peak_tflops, "given", utilization)
    use_cuda = config.device != "cpu" and torch.cuda.is_available()
    measured = measure_peak_tflops(
        torch.device("cuda" if use_cuda else "cpu"), config.compute.precision
    )
    return DeviceProfile(measured, "measured here", utilization)


def plan_inputs(
    config: RunConfig,
    num_classes: int | None,
    num_samples: int | None,
    open_evaluation: OpenEvaluation,
) -> tuple[int, int]:
    """Returns the numbers of classes and samples; None reads a number from the data.

    Images are opened only if both are None and data.images is set; otherwise the labels suffice.
    Raises the errors that the run would raise.
    """
    sources = config.data.sources
    are_paths_set = all(_UNKNOWN not in (source.images, source.labels) for source in sources)
    if num_classes is None and num_samples is None and are_paths_set:
        dataset = open_dataset(config)
        check_run(config, dataset, open_evaluation)
        return dataset.num_centers, len(dataset)
    if num_classes is not None and num_samples is not None:
        check_labels(config, (), num_classes)
        return num_classes, num_samples
    if config.data.labels == _UNKNOWN:
        raise ConfigInvalid(
            "data.labels is not set", remedy="set it, or give both --classes and --samples"
        )
    tables = label_tables(config)
    check_labels(config, tables, num_classes or tables[0].num_centers)
    rows = sum(int(table.artifact.summary["images"]) for table in tables)
    return num_classes or tables[0].num_centers, num_samples or round(
        rows * (1.0 - config.data.hold_out)
    )


def list_checkpoints(config: RunConfig) -> list[int]:
    """Returns the steps whose checkpoints a finished run keeps."""
    steps, keep = config.schedule.steps, config.checkpoint
    regular = range(keep.every_steps, steps + 1, keep.every_steps)
    archived = [step for step in regular if keep.keep_every and step % keep.keep_every == 0]
    return sorted({0, steps, *regular[-keep.keep_last :], *archived})


def _size(size_bytes: int) -> str:
    return (
        f"{size_bytes / 2**30:.4g} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.3g} MiB"
    )
