"""The loader: the same batches however they are decoded and by however many processes; bad images
left out.
"""

import io
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mlcd.errors import InvalidInput, Unavailable
from mlcd.training.data import decoders as decoders_module
from mlcd.training.data import loader as loader_module
from mlcd.training.data.augment import Augmentation
from mlcd.training.data.crops import crop_pictures
from mlcd.training.data.dataset import open_dataset
from mlcd.training.data.decoders import WorkerContext
from mlcd.training.data.loader import Loader
from mlcd.training.data.order import locate, step_positions
from mlcd.training.data.pictures import open_picture, picture_side
from tests.unit.training.conftest import label_images
from tests.unit.training.running import configured

HELD = ("data.memory_gib=1",)
THREADS = ("data.memory_gib=0", "data.workers=0")
PROCESSES = ("data.memory_gib=0", "data.workers=2")
# for what is of each process alone: one takes seconds to begin
A_PROCESS = ("data.memory_gib=0", "data.workers=1")

ENDS_WITHOUT_CLOSING = """
import sys
from pathlib import Path

from mlcd.training.config import RunConfig
from mlcd.training.data.augment import Augmentation
from mlcd.training.data.crops import crop_pictures
from mlcd.training.data.dataset import open_dataset
from mlcd.training.data.loader import Loader

if __name__ == "__main__":
    run = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    loader = Loader(open_dataset(run), run, rank=0, size=1, start_step=0)
    next(iter(loader))
    sys.exit(3)
"""


def write_shards(folder: Path, images: list[Path], num_shards: int) -> None:
    folder.mkdir()
    for shard in range(num_shards):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as archive:
            for number, path in enumerate(images[shard::num_shards]):
                buffer = io.BytesIO()
                Image.open(path).resize((12 + number % 5, 10 + number % 3)).save(buffer, "PNG")
                for suffix, data in (
                    ("png", buffer.getvalue()),
                    ("cls", path.parent.name.encode()),
                ):
                    member = tarfile.TarInfo(f"{path.stem}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="session")
def shards(digits, tmp_path_factory) -> Path:
    """60 digits, stretched in many ways, in 3 shards, a fourth one empty, and their labels."""
    out = tmp_path_factory.mktemp("shards")
    write_shards(out / "images", sorted(digits.rglob("*.png"))[:60], 3)
    tarfile.open(out / "images" / "shard-3.tar", "w").close()
    return label_images(out / "images", out)


@pytest.fixture
def config(shards, tiny_recipe, tmp_path):
    def make(*overrides, images=shards / "images"):
        steps = ("data.hold_out=0", "schedule.batch_size=24", "schedule.steps=6")
        sizes = ("model.image_size=10", "model.patch_size=5")
        labels = shards / "labels"
        return configured(tiny_recipe, images, labels, tmp_path / "run", *steps, *sizes, *overrides)

    return make


def load(config, *, rank=0, size=1, start_step=0):
    with Loader(
        open_dataset(config),
        config,
        rank=rank,
        size=size,
        start_step=start_step,
        num_labels=config.loss.num_labels,
    ) as loader:
        return list(loader)


def joined(steps):
    """All batches of all steps as arrays, in order."""
    batches = [batch for step in steps for batch in step.parts]
    return (
        torch.cat([batch.images for batch in batches]).numpy(),
        torch.cat([batch.labels for batch in batches]).numpy(),
        np.concatenate([batch.positions for batch in batches]),
        [key for batch in batches for key in batch.keys],
    )


def assert_same(one, other):
    for a, b in zip(joined(one), joined(other), strict=True):
        assert np.array_equal(a, b)


def test_a_gpu_gets_the_same_batches_in_pinned_memory(config, monkeypatch):
    """Every tensor that it copies is pinned, by a thread that has the GPU of this process."""
    pinned, devices = [], []

    def pin(shape, dtype):
        pinned.append(torch.empty(shape, dtype=dtype))
        return pinned[-1]

    monkeypatch.setattr(loader_module, "_allocate_pinned", pin)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    run, gpu = config("compute.accumulation=2", "loss.label_weights=scores"), torch.device("cuda:1")
    with Loader(open_dataset(run), run, rank=0, size=1, start_step=4, device=gpu) as loader:
        steps = list(loader)
    assert_same(steps, load(run, start_step=4))
    parts = [part for step in steps for part in step.parts]
    copied = [each for part in parts for each in (part.images, part.labels, part.weights)]
    assert len(copied) == len(pinned) == 12
    assert all(any(one is other for other in pinned) for one in copied)
    assert devices == [gpu]


def test_batches_hold_the_samples_of_their_positions(config):
    """From the sources by hand: the oracle of the whole room."""
    run = config()
    dataset = open_dataset(run)
    (part,) = dataset.parts
    steps = load(run)
    assert [step.step for step in steps] == list(range(6))
    for step in steps:
        (batch,) = step.parts
        positions = step_positions(step.step, 24)
        _, rows = locate(positions, [60], [1.0], run.seed)
        assert batch.images.shape == (24, 3, 10, 10)
        assert (batch.images.dtype, batch.labels.dtype) == (torch.uint8, torch.int64)
        assert batch.positions.tolist() == positions.tolist()
        augmentation = Augmentation(10, run.augment, run.seed)
        for place, row in enumerate(rows):
            data = part.source.read(part.entries[row])
            picture = open_picture(data, picture_side(10, run.augment), "exact")
            ((crop,),) = crop_pictures([picture], [int(positions[place])], augmentation)
            assert torch.equal(batch.images[place], crop)
            assert batch.labels[place].tolist() == part.labels[row].tolist()
            assert batch.keys[place] == part.entries[row].key
        assert batch.num_skipped == 0
        assert step.wait_s >= 0


@pytest.mark.parametrize("mode", [THREADS, A_PROCESS])
def test_all_views_of_an_image_come_with_its_labels_however_they_are_decoded(config, mode):
    views = ("augment.views=2", "augment.local_views=1", "augment.local_size=5")
    one, several = load(config(*HELD)), load(config(*HELD, *views))
    assert_same(one, several)
    for step, other in zip(several, load(config(*mode, *views)), strict=True):
        (batch,), (same,) = step.parts, other.parts
        assert [view.shape for view in batch.more_views] == [(24, 3, 10, 10), (24, 3, 5, 5)]
        assert not torch.equal(batch.images, batch.more_views[0])
        for view, expected in zip(batch.more_views, same.more_views, strict=True):
            assert torch.equal(view, expected)


def test_labels_are_drawn_anew_in_each_epoch_and_alike_in_any_number_of_processes(config):
    run = config("loss.labels_per_image=1", "loss.drawn_from=2", "schedule.batch_size=20")
    _, labels, positions, keys = joined(load(run))
    assert labels.shape == (120, 1)
    (part,) = open_dataset(run).parts
    stored = {part.entries[row].key: part.labels[row].tolist() for row in range(60)}
    assert all(label in stored[key] for (label,), key in zip(labels.tolist(), keys, strict=True))
    first, second = (
        dict(zip(keys[epoch], labels[epoch, 0], strict=True))
        for epoch in (slice(60), slice(60, 120))
    )
    assert 10 < sum(first[key] != second[key] for key in stored) < 50
    halves = [joined(load(run, rank=rank, size=2)) for rank in range(2)]
    together = {
        position: label
        for half in halves
        for position, label in zip(half[2], half[1][:, 0], strict=True)
    }
    assert together == dict(zip(positions, labels[:, 0], strict=True))


def test_held_streamed_and_by_workers_are_the_same_bits(config):
    torch.manual_seed(3)
    random_numbers = torch.get_rng_state()
    held = load(config(*HELD))
    assert_same(held, load(config(*THREADS)))
    assert_same(held, load(config(*PROCESSES)))
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert_same(held, load(config(*HELD, "data.workers=3", "data.prefetch_steps=1")))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("accumulation", [1, 5])
def test_processes_share_each_part_of_a_step(config, size, accumulation):
    """Also 8 processes for 4 shards, one of them empty."""
    run = config(f"compute.accumulation={accumulation}")
    whole = load(run)
    ranks = [load(run, rank=rank, size=size) for rank in range(size)]
    for step in range(6):
        assert len(whole[step].parts) == accumulation
        for part in range(accumulation):
            keys = [key for rank in ranks for key in rank[step].parts[part].keys]
            assert keys == list(whole[step].parts[part].keys)
    counts = [[len(batch.keys) for batch in step.parts] for step in whole]
    assert all(sum(count) == 24 and max(count) - min(count) <= 1 for count in counts)
    assert_same(load(config()), whole)


def test_more_processes_than_samples_leave_some_without(config):
    run = config("schedule.batch_size=2", "schedule.steps=2", "optim.warmup_steps=0")
    steps = load(run, rank=3, size=4)
    assert [len(step.parts[0].keys) for step in steps] == [0, 0]
    assert steps[0].parts[0].images.shape == (0, 3, 10, 10)
    assert steps[0].parts[0].labels.shape == (0, 2)


@pytest.mark.parametrize("mode", [HELD, THREADS, PROCESSES])
def test_resume_at_any_step_goes_on_as_if_undisturbed(config, mode):
    whole = load(config())
    for start in (3,) if mode == PROCESSES else (1, 3, 5):
        rest = load(config(*mode), start_step=start)
        assert [step.step for step in rest] == list(range(start, 6))
        assert_same(whole[start:], rest)
    assert load(config(*mode), start_step=6) == []


def damaged(shards, folder, num):
    """A copy of the shards in which `num` members of the first one are junk; their keys."""
    shutil.copytree(shards / "images", folder)
    path = folder / "shard-0.tar"
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.name.endswith(".png")][:num]
    for member in members:
        data[member.offset_data : member.offset_data + member.size] = b"x" * member.size
    path.write_bytes(data)
    return {f"shard-0/{member.name.removesuffix('.png')}" for member in members}


@pytest.mark.parametrize("mode", [HELD, THREADS, PROCESSES])
def test_corrupt_members_are_left_out_and_counted_never_replaced(
    config, shards, tmp_path, mode, caplog
):
    bad = damaged(shards, tmp_path / "images", 3)
    whole, steps = load(config()), load(config(*mode, images=tmp_path / "images"))
    for expected, step in zip(whole, steps, strict=True):
        (sound,), (batch,) = expected.parts, step.parts
        kept = [place for place, key in enumerate(sound.keys) if key not in bad]
        assert batch.keys == tuple(sound.keys[place] for place in kept)
        assert batch.positions.tolist() == sound.positions[kept].tolist()
        assert torch.equal(batch.images, sound.images[kept])
        assert torch.equal(batch.labels, sound.labels[kept])
        assert batch.num_skipped == 24 - len(kept)
    assert (
        sum(step.parts[0].num_skipped for step in steps) >= 6
    )  # 144 samples are more than two epochs
    for key in bad:
        assert caplog.text.count(f"{key} is left out") == 1


def test_a_shard_that_is_gone_is_left_out(config, shards, tmp_path):
    shutil.copytree(shards / "images", tmp_path / "images")
    run = config(*THREADS, images=tmp_path / "images")
    dataset = open_dataset(run)
    (tmp_path / "images" / "shard-1.tar").unlink()
    with Loader(dataset, run, rank=0, size=1, start_step=0) as loader:
        steps = list(loader)
    assert {key.split("/")[0] for step in steps for key in step.parts[0].keys} == {
        "shard-0",
        "shard-2",
    }
    assert sum(step.parts[0].num_skipped for step in steps[:5]) == 40  # two epochs


def test_a_shard_that_is_cut_short_gives_what_it_has(config, shards, tmp_path):
    shutil.copytree(shards / "images", tmp_path / "images")
    path = tmp_path / "images" / "shard-1.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run = config(images=tmp_path / "images")
    dataset = open_dataset(run)
    assert 40 < len(dataset) < 60
    assert dataset.num_missing == 60 - len(dataset)
    assert all(len(step.parts[0].keys) + step.parts[0].num_skipped == 24 for step in load(run))


def test_a_set_of_which_nothing_can_be_read_is_refused(config, shards, tmp_path):
    shutil.copytree(shards / "images", tmp_path / "images")
    run = config(*THREADS, images=tmp_path / "images")
    dataset = open_dataset(run)
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    with (
        Loader(dataset, run, rank=0, size=1, start_step=0) as loader,
        pytest.raises(InvalidInput, match="can be read, the last one shard-"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("mode", "start_step"), [(HELD, 0), (HELD, 5), (THREADS, 5), (A_PROCESS, 0)]
)
def test_a_changed_image_is_refused_by_name(config, shards, tmp_path, mode, start_step):
    shutil.copytree(shards / "images", tmp_path / "images")
    path = tmp_path / "images" / "shard-0.tar"
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.name.endswith(".png")]
    # Two images of the same size in each other's place.
    size = next(m.size for m in members if sum(m.size == other.size for other in members) > 1)
    one, other, *_ = [member for member in members if member.size == size]
    data = bytearray(path.read_bytes())
    first, second = (slice(m.offset_data, m.offset_data + size) for m in (one, other))
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)
    names = "|".join(f"shard-0/{member.name.removesuffix('.png')}" for member in (one, other))
    with pytest.raises(
        InvalidInput, match=f"({names}) in .*images differs from the image that was labeled"
    ):
        load(config(*mode, "schedule.steps=12", images=tmp_path / "images"), start_step=start_step)


@pytest.mark.parametrize("start_step", [0, 1, 4, 5])
def test_every_image_is_checked_wherever_the_start_is(config, start_step):
    """An epoch is 2.5 steps: the rest of one and the begin of the next, of another order, do not
    make a whole one.
    """
    run = config("schedule.steps=12")
    with Loader(open_dataset(run), run, rank=0, size=1, start_step=start_step) as loader:
        samples = [
            sample
            for step in range(start_step, 12)
            for sample in loader._samples(step_positions(step, 24))
        ]
    assert {sample.row for sample in samples if sample.sha256 is not None} == set(range(60))
    assert any(sample.sha256 is None for sample in samples)


def test_stop_signals_do_not_reach_the_workers(config):
    """Ctrl-C and a scheduler reach every process of a run; the trainer wants its batches until it
    has saved.
    """
    run = config(*A_PROCESS, "schedule.steps=40")
    with Loader(open_dataset(run), run, rank=0, size=1, start_step=0) as loader:
        steps = iter(loader)
        next(steps)
        for worker in loader._decoders._iterator._workers:
            for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(worker.pid, kind)
        assert len(list(steps)) == 39


@pytest.mark.parametrize("alive", [True, False])
def test_a_worker_that_outlives_its_trainer_while_it_starts_ends(monkeypatch, alive):
    """Otherwise torch would take the process that adopted it for its trainer, and never end it."""
    ended = []
    trainer = SimpleNamespace(is_alive=lambda: alive)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: trainer)
    monkeypatch.setattr(os, "_exit", ended.append)
    decoders_module._exit_if_orphaned(0)
    assert ended == ([] if alive else [1])


def ask_forever(event):
    while not event.is_set():
        pass


def test_a_process_that_is_killed_while_it_asks_holds_up_no_other():
    """The event of multiprocessing is locked while a process asks for its state."""
    context = WorkerContext()
    event = context.Event()
    for _ in range(4):
        process = context.Process(target=ask_forever, args=(event,), daemon=True)
        process.start()
        assert not multiprocessing.connection.wait([process.sentinel], timeout=2)  # it is at work
        process.kill()
        process.join()
        asking = threading.Thread(target=event.is_set, daemon=True)
        asking.start()
        asking.join(10)
        assert not asking.is_alive()
    event.set()
    process = context.Process(target=ask_forever, args=(event,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_killed_worker_is_a_clear_error_within_seconds(config):
    run = config(*PROCESSES, "schedule.steps=5000")
    with Loader(open_dataset(run), run, rank=0, size=1, start_step=0) as loader:
        steps = iter(loader)
        next(steps)
        os.kill(loader._decoders._iterator._workers[0].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"worker process .* was killed: .*data\.workers"):
            list(steps)
        assert time.monotonic() - began < 30


def test_closing_early_ends_threads_and_processes(config):
    for mode in (THREADS, PROCESSES):
        run = config(*mode, "schedule.steps=5000")
        with Loader(open_dataset(run), run, rank=0, size=1, start_step=0) as loader:
            next(iter(loader))
            workers = loader._decoders._iterator._workers if mode == PROCESSES else []
            began = time.monotonic()
        assert time.monotonic() - began < 30  # of 5,000 steps, which are minutes
        assert not any(worker.is_alive() for worker in workers)


def test_a_trainer_that_ends_without_closing_does_not_hang(config, tmp_path):
    run = config(*PROCESSES, "schedule.steps=5000")
    (tmp_path / "run.json").write_text(run.model_dump_json())
    (tmp_path / "trainer.py").write_text(ENDS_WITHOUT_CLOSING)
    command = [sys.executable, tmp_path / "trainer.py", tmp_path / "run.json"]
    assert subprocess.run(command, timeout=60, check=False, capture_output=True).returncode == 3


def test_only_some_steps_are_decoded_ahead_and_held_images_once(config):
    for mode, bound in ((THREADS, 2 + 1), (HELD, 2 + 1)):
        run = config(*mode, "schedule.steps=100", "data.prefetch_steps=2")
        dataset = open_dataset(run)
        source, reads = dataset.parts[0].source, []
        original = source._read
        source._read = lambda entry, reads=reads, original=original: (
            reads.append(entry.key) or original(entry)
        )
        with Loader(dataset, run, rank=0, size=1, start_step=0) as loader:
            steps = iter(loader)
            next(steps)
            time.sleep(1)
            chunks_ahead = 2 * loader._num_decoders + 1
            assert (
                24
                < len(reads)
                <= 24 * bound + chunks_ahead * 24 / min(loader._num_decoders, 24) + 24
            )
            if mode == HELD:
                list(steps)
                assert (
                    len(reads) <= len(set(reads)) + 60
                )  # a sample met by two threads at once is read twice
                assert set(reads) == {entry.key for entry in dataset.parts[0].entries}


def test_a_mixture_takes_its_share_of_every_source(config, shards):
    run = config()
    mix = [
        {"images": str(shards / "images"), "labels": str(shards / "labels"), "weight": 3.0},
        {"images": str(shards / "images"), "labels": str(shards / "labels"), "weight": 1.0},
    ]
    fields = run.model_dump()
    fields["data"] = {"mix": mix, "hold_out": 0, "workers": 0, "memory_gib": 0}
    mixed = run.model_validate(fields)
    held = run.model_validate({**fields, "data": {**fields["data"], "memory_gib": 1}})
    streamed = load(mixed)
    assert_same(streamed, load(held))
    parts, rows = locate(np.arange(144), [60, 60], [3.0, 1.0], run.seed)
    assert 20 < (parts == 1).sum() < 55
    entries = open_dataset(mixed).parts[0].entries
    assert joined(streamed)[3] == [entries[row].key for row in rows]
