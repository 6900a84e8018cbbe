"""`mlcd train --rounds`: train, embed, cluster, label, train on."""

import json
import os
import signal
import time

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.selection import Selection
from tests.conftest import refuse, start_mlcd, succeed

MADE = ("features", "centers", "labels", "run")


def command(journey, digits, tiny_recipe, out, *more):
    return [
        "train", tiny_recipe, f"data.images={digits}", f"data.labels={journey / 'labels'}",
        f"out={out}", "telemetry.peak_tflops=1", "log_every=1", "checkpoint.every_steps=4",
        "--rounds", 2, "--clusters", 12, *more,
    ]  # fmt: skip


def digest_of(path):
    return json.loads((path / "manifest.json").read_text())["digest"]


@pytest.mark.slow
def test_rounds_killed_anywhere_end_with_the_same_bytes(journey, digits, tiny_recipe, tmp_path):
    whole, parts, chosen = tmp_path / "whole", tmp_path / "parts", tmp_path / "selection"
    succeed("curate", journey / "features", chosen, "--duplicates", 0.8)
    on_kept = f"data.selection={chosen}"
    succeed(*command(journey, digits, tiny_recipe, whole, on_kept))
    for number in (1, 2):
        metrics = parts / f"round-{number}" / "run.partial" / "metrics.jsonl"
        process = start_mlcd(
            *command(journey, digits, tiny_recipe, parts, on_kept), start_new_session=True
        )
        deadline = time.monotonic() + 200
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 6):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    succeed(*command(journey, digits, tiny_recipe, parts, on_kept))
    for name in MADE:
        assert digest_of(whole / "round-2" / name) == digest_of(parts / "round-2" / name), name
    kept = Selection.open(chosen).read_keys().to_pylist()
    assert 0 < len(kept) < 200
    assert sorted(EmbeddingsArtifact.open(whole / "round-2" / "features").keys) == sorted(kept)
    # The second head starts from the new centers, and the second tower from the first.
    second = open_artifact(whole / "round-2" / "run")
    roles = {parent.role for parent in second.parents}
    assert roles == {"labels", "images", "selection", "centers", "start"}
    first_step = whole / "round-2" / "run" / "checkpoints" / "step_000000"
    clustered = Centers.open(whole / "round-2" / "centers")
    assert np.abs(Centers.open(first_step / "centers").vectors - clustered.vectors).max() < 1e-6
    assert clustered.fingerprint == open_artifact(first_step).fingerprint
    succeed("verify", whole)


def test_rounds_are_not_resumed_as_a_run_is(journey, digits, tiny_recipe, tmp_path):
    for arguments, message in (
        (["train", "--resume", tmp_path / "run", "--rounds", "2"], "give the recipe again"),
        ([*command(journey, digits, tiny_recipe, tmp_path / "x")[:-4], "--clusters", 3],
         "requires --rounds"),
    ):  # fmt: skip
        refuse(*arguments, contains=message)
