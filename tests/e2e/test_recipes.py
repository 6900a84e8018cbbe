"""The recipe `smoke` by the public commands: tar shards of real images to a trained tower in under
a minute.
"""

import json
import tarfile
import time

from tests.conftest import succeed


def write_shards(images, folder, *, num_shards):
    """Tar shards in webdataset's layout, of the images in turn."""
    folder.mkdir()
    paths = sorted(images.rglob("*.png"))
    for number in range(num_shards):
        with tarfile.open(folder / f"digits-{number}.tar", "w") as shard:
            for path in paths[number::num_shards]:
                shard.add(path, f"{path.parent.name}_{path.name}")


def test_smoke_trains_from_tar_shards_in_under_a_minute(digits, tmp_path):
    write_shards(digits, tmp_path / "shards", num_shards=3)
    shards = tmp_path / "shards" / "*.tar"
    steps = [
        ("embed", shards, tmp_path / "features", "--model", "hog"),
        ("cluster", tmp_path / "features", tmp_path / "centers", "--clusters", 20),
        ("label", tmp_path / "features", tmp_path / "labels", "--centers", tmp_path / "centers"),
    ]
    for step in steps:
        succeed(*step)
    places = [
        f"data.images={shards}",
        f"data.labels={tmp_path / 'labels'}",
        f"out={tmp_path / 'run'}",
    ]
    began = time.perf_counter()
    succeed("train", "smoke", *places)
    assert time.perf_counter() - began < 60
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    first, last = lines[0], lines[-1]
    assert last["step"] == 80
    assert last["loss"] < first["loss"] - 1
    assert last["positive_cosine"] > last["negative_cosine"] + 0.1
    for name in (
        "images_per_s",
        "tflops",
        "mfu",
        "data_wait",
        "peak_memory_gib",
        "unique_positives",
    ):
        assert last[name] >= 0
    assert last["skipped_samples"] == 0
