"""A plan's figures are those of a run: counted products, real tensors, a measured peak, files on
disk.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mlcd.errors import ConfigInvalid
from mlcd.models.vit import ViT
from mlcd.training.byte_counts import activation_bytes, backbone_bytes, center_bytes, step_memory
from mlcd.training.config import load_config
from mlcd.training.flops import (
    backbone_flops,
    estimate_distinct,
    estimate_drawn,
    forward_flops,
    head_flops,
    step_flops,
)
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.row_adamw import center_optimizer
from mlcd.training.optim.average import WeightAverage
from mlcd.training.optim.groups import parameter_groups
from mlcd.training.plan import DeviceProfile, list_checkpoints, plan_training
from mlcd.training.tower import freeze
from tests.conftest import call_mlcd, refuse, succeed

PLACES = ["data.images=i", "data.labels=l", "out=o"]
SMALL = [
    *PLACES,
    (
        "model={image_size: 48, patch_size: 8, width: 64, depth: 3, heads: 2, mlp_width: 160, "
        "embedding_dim: 24}"
    ),
    "schedule={steps: 40, batch_size: 8}",
    "optim.warmup_steps=5",
]
H200 = DeviceProfile(peak_tflops=790.0)


def small(*overrides):
    return load_config("demo-photos", [*SMALL, *overrides])


def counted(work):
    # The counter knows neither fused attention on the CPU nor products that are added in place.
    in_place = {
        torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]
    }
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=in_place) as counter,
    ):
        work()
    return counter.get_total_flops()


def tower(config):
    trunk = ViT(config.model.vit())
    trunk.initialize(torch.Generator().manual_seed(0))
    freeze(trunk, config.model)
    return trunk


@pytest.mark.parametrize("output", ["projected", "patches"])
def test_forward_flops_are_those_that_torch_counts(output):
    config = small()
    total = counted(lambda: tower(config)(torch.rand(1, 3, 48, 48), output))
    unused = 2 * 64 * 24 if output == "patches" else 0  # patches are not projected
    assert total == forward_flops(config.model.vit(), output) - unused


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_backward_flops_are_those_that_torch_counts(frozen, positions):
    config = small(f"model.freeze={frozen}", f"model.positions={positions}")
    assert counted(
        lambda: tower(config)(torch.rand(1, 3, 48, 48)).sum().backward()
    ) == backbone_flops(config)


def test_recomputation_adds_the_blocks_once_more():
    config, trunk = small("compute.recompute=true"), tower(small())
    for block in trunk.blocks:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain, **options: torch.utils.checkpoint.checkpoint(
            plain, *inputs, use_reentrant=False, **options
        )
    assert counted(lambda: trunk(torch.rand(1, 3, 48, 48)).sum().backward()) == backbone_flops(
        config
    )


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [("mlcd", 0.5), ("mlcd", 1.0), ("mlc", 0.25), ("cd", 0.25)],
)
def test_head_flops_are_those_that_torch_counts(kind, ratio):
    config = small(f"loss.kind={kind}", f"loss.negative_ratio={ratio}", "loss.labels_per_image=3")
    head = PartialFC(400, 24, HeadConfig.of(config.loss, 400, 0))
    head.initialize(0)
    embeddings, labels = torch.randn(8, 24, requires_grad=True), torch.arange(24).reshape(8, 3)

    def forward_and_backward():
        head(embeddings, labels, 0).loss.backward()

    total = counted(forward_and_backward)
    positives = (
        8 * 2 * 24 * 3 * (1 if kind == "cd" else 3)
    )  # element by element: torch counts no such products
    assert total == pytest.approx(8 * head_flops(config, 400) - positives, rel=1e-9)
    # A row for each drawn class and label, of which the plan knows no more than their numbers.
    assert head.weight.grad._nnz() * 24 * 4 == step_memory(config, 400, 1).center_gradient


def test_the_classes_that_partialfc_draws_are_the_positives_where_they_are_more():
    assert estimate_distinct(3, 1000) == pytest.approx(1000 * (1 - 0.999**3))
    # method.md section 4: 32,800 x 8 labels hit about 230,800 of a million classes.
    assert estimate_distinct(32_800 * 8, 10**6) == pytest.approx(230_800, rel=1e-3)
    paper = ["schedule.batch_size=32800", "loss.labels_per_image=8", "loss.negative_ratio=0.1"]
    assert estimate_drawn(small(*paper), 10**6) == 100_000
    assert estimate_drawn(small(*paper, "loss.policy=partialfc"), 10**6) == pytest.approx(
        230_800, rel=1e-3
    )


@pytest.mark.parametrize(
    ("update", "options"),
    [("sparse", ()), ("dense", ()), ("sparse", ("model.freeze=1", "optim.ema=0.9"))],
)
def test_the_state_is_counted_to_the_byte(update, options):
    config = small(f"loss.center_update={update}", *options)
    trunk, centers = tower(config), PartialFC(50, 24, HeadConfig.of(config.loss, 50, 0))
    centers.initialize(0)
    optimizers = (
        torch.optim.AdamW(parameter_groups(trunk, config.optim), lr=1e-3),
        center_optimizer(centers, config.optim),
    )
    centers(trunk(torch.rand(8, 3, 48, 48)), torch.arange(32).reshape(8, 4), 0).loss.backward()
    for optimizer in optimizers:
        optimizer.step()

    def held(module, optimizer):
        tensors = [*module.parameters()]
        for parameter in module.parameters():
            # AdamW's own step counters are a number a tensor.
            tensors += [
                value for name, value in optimizer.state[parameter].items() if name != "step"
            ]
        return sum(tensor.nbytes for tensor in tensors)

    gradients = sum(each.grad.nbytes for each in trunk.parameters() if each.grad is not None)
    average = WeightAverage.of(trunk, 0.9).weights if options else {}
    averaged = sum(tensor.nbytes for tensor in average.values())
    assert held(trunk, optimizers[0]) + gradients + averaged == backbone_bytes(config, 1)
    assert held(centers, optimizers[1]) == center_bytes(config, 50, 1)


def test_shards_share_the_state():
    config = small("compute.backbone=fsdp", "compute.precision=bf16")
    short = small("compute.backbone=fsdp", "compute.precision=bf16", "compute.gathered=bf16")
    copies = [step_memory(each, 1000, 4).backbone_copies for each in (config, short)]
    # bytes a weight: 12 of one block; and 2 of all three, with 16 of one block
    assert copies[1] / copies[0] == pytest.approx(12 / (3 * 2 + 16), rel=1e-3)
    assert center_bytes(config, 1000, 8) == 125 * (3 * 4 * 24 + 8)
    assert center_bytes(config, 1001, 8) == 126 * (3 * 4 * 24 + 8)
    whole, eighth = backbone_bytes(config, 1), backbone_bytes(config, 8)
    assert whole / 8 <= eighth < 1.02 * whole / 8
    assert backbone_bytes(small("compute.backbone=ddp"), 8) == whole


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("option", ["model.freeze=0", "model.freeze=1", "model.positions=rope"])
def test_activations_are_what_autograd_keeps(activation, precision, option):
    config = small(f"model.activation={activation}", f"compute.precision={precision}", option)
    trunk = tower(config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in trunk.parameters()}
    cast_shapes = {tuple(parameter.shape) for parameter in trunk.parameters()} | {
        (160, 64),
        (64, 160),
        (64, 192),
    }
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        is_cast = (
            tensor.dtype == torch.bfloat16
            and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & cast_shapes
        )
        if storage.data_ptr() not in weights and not is_cast:
            kept[storage.data_ptr()] = storage
        return tensor

    images = torch.rand(8, 3, 48, 48)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        output = trunk(images / 255.0)
    assert output.grad_fn is not None
    item, tokens = (2 if precision == "bf16" else 4), 37
    pixels, gradients = 8 * 3 * 48**2 * 4, 8 * tokens * (2 * item * 160 + 2 * 4 * 64)
    expected = activation_bytes(config, 8) - pixels - gradients
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(expected, rel=0.05)


PEAK = """
import sys, torch
from pathlib import Path
from tests.unit.training.test_plan import small, tower
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.telemetry.throughput import peak_memory_bytes
from mlcd.training.head.row_adamw import center_optimizer
from mlcd.training.optim.groups import parameter_groups
config = small(*sys.argv[1:])
size, batch = config.model.image_size, config.schedule.batch_size
trunk, centers = tower(config), PartialFC(3000, 24, HeadConfig.of(config.loss, 3000, 0))
centers.initialize(0)
tower_optimizer = torch.optim.AdamW(parameter_groups(trunk, config.optim))
optimizers = tower_optimizer, center_optimizer(centers, config.optim)
def step(batch):
    images, labels = torch.rand(batch, 3, size, size) * 255, torch.randint(0, 3000, (batch, 4))
    x = trunk(images / 255)
    centers(x, labels, 0).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
step(2)
status = Path('/proc/self/status').read_text().splitlines()
before = int(next(l for l in status if 'VmRSS' in l).split()[1]) * 1024
Path('/proc/self/clear_refs').write_text('5')  # the peak counts from here
step(batch)
print(peak_memory_bytes(torch.device('cpu')) - before)
"""


def test_the_peak_of_a_step_is_near_what_was_planned():
    overrides = [
        "schedule.batch_size=96",
        "model.width=128",
        "model.mlp_width=512",
        "num_threads=1",
    ]
    # Every tensor by mmap, so that freed memory is given back and the peak is that of live tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, *overrides]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    config = small(*overrides)
    memory = step_memory(config, 3000, 1)
    # Weights and moments were there before.
    expected = memory.total - memory.centers - 3 * memory.backbone // 4
    assert 0.6 < int(result.stdout) / expected < 1.4


def test_accumulation_recomputation_and_processes_save_memory():
    plain = step_memory(small("schedule.batch_size=64"), 1000, 1)
    parts = step_memory(small("schedule.batch_size=64", "compute.accumulation=4"), 1000, 1)
    recompute = step_memory(small("schedule.batch_size=64", "compute.recompute=true"), 1000, 1)
    ranks = step_memory(small("schedule.batch_size=64"), 1000, 4)
    assert parts.activations == plain.activations // 4 == ranks.activations
    assert recompute.activations < plain.activations
    assert ranks.centers == plain.centers // 4
    assert ranks.head > 3 * 64 * 24 * 4  # embeddings of all processes are gathered


def test_bf16_halves_the_head_s_neighbors_but_not_the_state():
    fp32, bf16 = (
        step_memory(small(f"compute.precision={precision}"), 1000, 1)
        for precision in ("fp32", "bf16")
    )
    assert bf16.activations < fp32.activations
    assert (bf16.backbone, bf16.centers, bf16.head) == (fp32.backbone, fp32.centers, fp32.head)
    assert bf16.backbone_copies == fp32.backbone // 8  # two bytes a weight, of four times four


def test_the_paper_s_run_takes_what_method_md_computed():
    # method.md sections 5 and 10: L/14 about 6.1e21 FLOP and 7 days of 80 A100 (312 TFLOP/s) at 40
    # %; the state of a million centers of 768, 12.29 GB with their gradient.
    recipe = load_config("vit-l14-1m", [*PLACES, "compute.recompute=false"])
    plan = plan_training(recipe, 10**6, 400_000_000, 80, DeviceProfile(peak_tflops=312.0))
    assert plan.flops == pytest.approx(6.1e21, rel=0.05)
    assert plan.seconds / 86400 == pytest.approx(7.0, rel=0.05)
    assert plan.epochs == pytest.approx(32, rel=0.01)
    assert 4 / 3 * 3 * 4 * 768 * 10**6 == 12.288e9
    assert center_bytes(recipe, 10**6, 1) == 3 * 4 * 768 * 10**6 + 8 * 10**6


def test_time_follows_devices_and_utilization():
    config = small()
    one = plan_training(config, 1000, 320, 1, H200)
    four = plan_training(config, 1000, 320, 4, H200)
    half = plan_training(config, 1000, 320, 1, DeviceProfile(790.0, utilization=0.2))
    assert one.seconds == pytest.approx(40 * 8 * step_flops(config, 1000) / (0.4 * 790e12))
    assert (four.seconds, half.seconds) == pytest.approx((one.seconds / 4, 2 * one.seconds))
    assert one.epochs == 1.0


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["checkpoint.every_steps=10"], [0, 40]),
        (["checkpoint.every_steps=7", "checkpoint.keep_last=2"], [0, 28, 35, 40]),
        (["checkpoint.every_steps=5", "checkpoint.keep_every=20"], [0, 20, 40]),
        (["checkpoint.every_steps=100"], [0, 40]),
    ],
)
def test_kept_checkpoints_are_counted(overrides, kept):
    assert list_checkpoints(small(*overrides)) == kept


@pytest.mark.parametrize(
    ("overrides", "num_classes", "world_size", "message"),
    [
        ([], 4, 1, "leave no negative among 4"),
        ([], 1000, 9, "one image for each of 9 processes"),
        (["compute.accumulation=4"], 1000, 3, "one image for each of 3 processes"),
    ],
)
def test_what_cannot_run_is_refused(overrides, num_classes, world_size, message):
    with pytest.raises(ConfigInvalid, match=message):
        plan_training(small(*overrides), num_classes, 1000, world_size, H200)


def test_the_plan_of_the_command_follows_the_labels_and_a_checkpoint_is_as_large_as_told(
    journey, digits, tiny_recipe
):
    places = [f"data.images={digits}", f"data.labels={journey / 'labels'}", "out=nowhere"]
    result = succeed("train", tiny_recipe, *places, "--plan", "--peak-tflops", 0.1, "--json")
    facts = json.loads(result.stdout)
    labels = json.loads((journey / "labels" / "manifest.json").read_text())
    assert facts["num_classes"] == labels["config"]["num_centers"]
    assert facts["num_samples"] == round(0.8 * labels["summary"]["images"])
    folder = journey / "run" / "checkpoints" / "step_000030"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert (
        facts["checkpoint_bytes"] <= size < 1.25 * facts["checkpoint_bytes"]
    )  # a tiny model has a large header


def test_the_plan_for_people_names_what_it_rests_on():
    result = succeed(
        *("train", "vit-b32-1m", "--plan", "--classes", 1_000_000, "--samples", 400_000_000),
        *("--processes", 8, "--peak-tflops", 790, "--mfu", 0.35),
    )
    for fact in (
        "1000000 centers of 512",
        "in each of 8 processes",
        "35 % of 790 TFLOP/s a process, given",
    ):
        assert fact in result.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.images=nowhere"], "nowhere"),
        (["loss.labels_per_image=5"], "labels per image"),
        (
            ["evaluation.every_steps=5", "evaluation.knn=false"],
            "requires evaluation.knn or evaluation.linear_probe",
        ),
        (["model.start=nowhere"], "the model nowhere does not exist"),
        (["data.hold_out=0", "evaluation.every_steps=5"], "hold_out=0"),
        (["out={digits}/inside"], "inside"),
        (["out={journey}/labels"], "holds labels"),
        (["optim.warmup_steps=99"], "optim.warmup_steps=99"),
    ],
)
def test_a_plan_refuses_what_the_run_refuses(
    journey, digits, tiny_recipe, tmp_path, overrides, message
):
    places = [f"data.images={digits}", f"data.labels={journey / 'labels'}", f"out={tmp_path / 'r'}"]
    changes = [each.format(digits=digits, journey=journey) for each in overrides]
    arguments = ["train", tiny_recipe, *places, *changes]
    planned = call_mlcd(*arguments, "--plan", "--peak-tflops", 0.1)
    run = call_mlcd(*arguments)
    assert (planned.returncode, planned.stderr) == (2, run.stderr)
    assert message in planned.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo-photos", "--plan", "--rounds", "2"], "--plan estimates one training"),
        (["demo-photos", "--processes", "2"], "require --plan"),
        (["--plan"], "needs a RECIPE"),
        (
            ["demo-photos", "--plan", "--classes", "100"],
            "data.labels is not set: set it, or give both --classes and --samples",
        ),
    ],
)
def test_a_wrong_use_of_the_plan_is_one_clear_line(arguments, message):
    refuse("train", *arguments, contains=message)
