"""GPUs of a Ray cluster, as Ray counts them: the engines run on the CPU where there is none."""

import functools
import json
import subprocess
import sys
from os import getenv

import pytest

from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.export.model_artifact import export_model
from mlcd.images.sources import open_source
from mlcd.pipelines.embed import Embedder, embed
from mlcd.pipelines.ray.calls import RayCalls
from mlcd.pipelines.ray.session import RayOptions, ray_session
from mlcd.progress import Reporter
from tests.e2e.test_ray import STORE_BYTES, check_same, quiet_ray  # noqa: F401 - a fixture
from tests.unit.models.test_checkpoints import SIZES, tower, write_hf

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

SILENT = Reporter("silent")
PART_IMAGES = 20

# Every worker notes what it has of the node, and begins once as many as are wanted have noted it.
WITNESS = """
import functools, json, os, sys, time
from pathlib import Path
import ray
from mlcd.cli import main
from mlcd.pipelines.ray import shards as on_ray
notes, wanted = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
class Witness(on_ray.EmbedRecipe):
    def open(self, num_threads):
        for shards in super().open(num_threads):
            if ray.is_initialized():
                meet(notes, wanted)
            yield shards
def meet(notes, wanted):
    import torch
    context, pid = ray.get_runtime_context(), os.getpid()
    has = {
        "assigned": context.get_assigned_resources(),
        "gpus": context.get_accelerator_ids()["GPU"],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cuda": torch.cuda.is_available(),
    }
    (notes / f"{pid}.new").write_text(json.dumps(has))
    (notes / f"{pid}.new").rename(notes / f"{pid}.json")
    until = time.monotonic() + 120
    while len(list(notes.glob("*.json"))) < wanted:
        if time.monotonic() > until:
            raise RuntimeError("the other workers did not begin")
        time.sleep(0.05)
on_ray.EmbedRecipe = Witness
on_ray.embed_on_ray = functools.partial(on_ray.embed_on_ray, part_entries=PART_IMAGES)
main()
""".replace("PART_IMAGES", str(PART_IMAGES))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny tower, whose weights torch runs."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "weights").mkdir()
    write_hf(tower(SIZES[1], activation="quick_gelu"), folder / "weights")
    export_model(str(folder / "weights"), folder / "model", name="m", reporter=SILENT)
    return folder / "model"


@pytest.fixture
def cluster(monkeypatch):
    """One node of four CPUs and one GPU, which every process sees."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    own = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 1, **own})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def embed_there(digits, model, out, *options, num_workers):
    """Returns what each worker noted."""
    notes = out.parent / f"{out.name}-notes"
    notes.mkdir()
    given = ("embed", digits, out, "--model", model, "--on", "ray", *options)
    command = [sys.executable, "-c", WITNESS, notes, num_workers, *given]
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in notes.glob("*.json")]


@pytest.fixture
def embed_here(digits, model, tmp_path, monkeypatch):
    """Embeds the same parts by this process alone."""
    of_few = functools.partial(Embedder, part_entries=PART_IMAGES)
    monkeypatch.setattr("mlcd.pipelines.embed.Embedder", of_few)

    def embedded(engine, num_threads):
        options = EncoderOptions(engine=engine, num_threads=num_threads)
        encoder = open_encoder(str(model), options)
        try:
            return embed(open_source(str(digits)), encoder, tmp_path / "alone", SILENT)
        finally:
            encoder.close()

    return embedded


def test_two_workers_share_a_gpu(cluster, digits, model, embed_here, tmp_path):
    """There is room for four by their CPUs, and for two by their halves of the GPU."""
    given = ("--gpus", 0.5, "--engine", "torch")
    noted = embed_there(digits, model, tmp_path / "there", *given, num_workers=2)
    assert len(noted) == 2
    for worker in noted:
        assert worker["assigned"] == {"CPU": 1.0, "GPU": 0.5}
        assert (worker["gpus"], worker["visible"]) == (["0"], "0")
    # on the CPU, the last bits of torch depend on its number of threads
    alone = embed_here("torch", num_threads=1)
    check_same(tmp_path / "there", alone)
    assert alone.config["engine"] == "torch"


def test_workers_without_gpus_see_none(cluster, digits, model, embed_here, tmp_path):
    noted = embed_there(digits, model, tmp_path / "there", "--workers", 2, num_workers=2)
    assert len(noted) == 2
    for worker in noted:
        assert worker["assigned"] == {"CPU": 1.0}
        assert (worker["gpus"], worker["visible"], worker["cuda"]) == ([], "", False)
    alone = embed_here("openvino", num_threads=2)
    check_same(tmp_path / "there", alone)


@pytest.mark.parametrize(("gpus", "seen"), [(0.0, ""), (0.5, "0")])
def test_calls_see_gpus_only_where_they_have_some(cluster, gpus, seen):
    options = RayOptions(gpus=gpus)
    with ray_session(options.address) as ray:
        calls = RayCalls(ray, options)
        for _ in range(2):
            assert calls.result(calls.call(getenv, "CUDA_VISIBLE_DEVICES")) == seen
            calls.result(calls.reduce(int))  # on the same processes, and without GPUs
