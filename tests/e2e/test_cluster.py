"""`mlcd cluster` as users run it: killed and resumed, by several processes, in bounded memory, with
a report.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact, part_name
from mlcd.clustering.nearest import nearest_centers
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, refuse, run_python, succeed
from tests.e2e.test_train import torchrun, worker_of
from tests.ranks import call_together
from tests.written_artifacts import write_embeddings

NUM_ROWS, DIMENSION, CLUSTERS = 3000, 16, 60
COMMAND = [
    "--clusters",
    CLUSTERS,
    "--iterations",
    5,
    "--seed",
    3,
    "--subtract-mean",
    "--names",
    "--hold-out",
    0.1,
]


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(0)
    means = generator.standard_normal((10, DIMENSION))
    return unit_rows(
        means[np.arange(NUM_ROWS) % 10] + 0.7 * generator.standard_normal((NUM_ROWS, DIMENSION))
    )


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory, rows):
    parts = [rows[:1000], rows[1000:1001], rows[1001:]]
    classes = [str(number % 10) for number in range(NUM_ROWS)]
    return write_embeddings(tmp_path_factory.mktemp("embeddings") / "e", parts, classes=classes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, embeddings):
    out = tmp_path_factory.mktemp("whole") / "centers"
    succeed("cluster", embeddings, out, *COMMAND)
    return out


def manifest(out):
    return json.loads((out / "manifest.json").read_text())


# Dies by SIGKILL, as `kill -9` would have it, before or after the checkpoint of one iteration
# stands.
DIES = """
import os, signal, sys
from mlcd.pipelines import cluster
save, iteration, before = cluster._save_state, int(sys.argv.pop(1)), sys.argv.pop(1) == "before"
def dying(draft, state):
    if state.iteration == iteration and before:
        os.kill(os.getpid(), signal.SIGKILL)
    save(draft, state)
    if state.iteration == iteration:
        os.kill(os.getpid(), signal.SIGKILL)
cluster._save_state = dying
from mlcd.cli import main
main()
"""


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_killed_at_each_iteration_it_ends_with_the_same_bytes(tmp_path, embeddings, whole, when):
    out = tmp_path / "centers"
    arguments = [str(argument) for argument in ("cluster", embeddings, out, *COMMAND)]
    num_iterations = len(manifest(whole)["summary"]["objective_history"])
    assert num_iterations >= 4
    for iteration in range(num_iterations):
        command = [sys.executable, "-c", DIES, str(iteration), when, *arguments]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert not out.exists()
    succeed(*arguments)
    assert manifest(out)["digest"] == manifest(whole)["digest"]
    assert manifest(out)["summary"] == manifest(whole)["summary"]
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_write_the_same_artifact(tmp_path, embeddings, whole, size):
    out = tmp_path / "centers"
    result = call_together(size, "cluster", embeddings, out, *COMMAND)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("centers of") == 1
    assert manifest(out)["digest"] == manifest(whole)["digest"]
    assert manifest(out)["summary"] == manifest(whole)["summary"]


@pytest.mark.parametrize("bad", [(0,), (2500,), (0, 2500)], ids=["first", "last", "both"])
def test_of_several_processes_one_tells_what_went_wrong_and_in_one_line(tmp_path, rows, bad):
    broken = rows.copy()
    broken[list(bad)] = np.nan
    place = write_embeddings(tmp_path / "e", [broken])
    result = call_together(
        2, "cluster", place, tmp_path / "centers", "--clusters", 2, "--hold-out", 0
    )
    assert result.returncode != 0
    assert [
        line
        for line in result.stderr.splitlines()
        if "holds NaN or Inf" in line and line.startswith("mlcd: ")
    ]
    assert result.stderr.count("holds NaN or Inf") == 1
    assert "[rank" not in result.stderr  # torch's way to show a traceback of ours
    assert "mlcd/pipelines" not in result.stderr


def test_a_process_that_dies_is_told_in_one_line(tmp_path, embeddings):
    out = tmp_path / "centers"
    command = torchrun(2, "cluster", embeddings, out, "--clusters", 1500, "--iterations", 100000)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as launcher:
        checkpoint = tmp_path / "centers.partial" / ".checkpoint.npz"
        deadline = time.monotonic() + 100
        while not checkpoint.is_file():
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(worker_of(launcher, 1), signal.SIGKILL)
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert "[rank" not in told
    assert "mlcd/pipelines" not in told


def test_a_damaged_checkpoint_is_worth_nothing(tmp_path, embeddings, whole):
    out = tmp_path / "centers"
    killed = run_python(
        DIES, "1", "after", *map(str, ["cluster", embeddings, out, *COMMAND]), check=False
    )
    assert killed.returncode == -signal.SIGKILL
    checkpoint = out.with_name("centers.partial") / ".checkpoint.npz"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    succeed("cluster", embeddings, out, *COMMAND)
    assert manifest(out)["digest"] == manifest(whole)["digest"]


def test_a_report_says_how_good_the_clusters_are(tmp_path, embeddings, rows):
    out = tmp_path / "centers"
    succeed("cluster", embeddings, out, "--clusters", 10, "--report")
    report = json.loads((out / "report.json").read_text())
    assert sum(entry["clusters"] for entry in report["sizes"]) == 10
    assert report["purity"] > 0.8
    assert report["ari"] > 0.5
    assert 0 < report["conflict_rate"] < 0.5
    assert report["near_duplicate_centers"]["asked"] == 10
    assert 0.5 < report["intra_cluster_cosine"]["0.5"] < 1
    assert (
        manifest(out)["summary"].items() >= {"ari": report["ari"], "sizes": report["sizes"]}.items()
    )
    with Image.open(out / "sizes.png") as picture:
        assert picture.size[0] > 200
        assert len(picture.convert("RGB").getcolors(100_000)) > 2
    # Times and pictures are no part of what was made: the centers are those of a run without a
    # report.
    plain = tmp_path / "plain"
    succeed("cluster", embeddings, plain, "--clusters", 10)
    assert (plain / "centers.npy").read_bytes() == (out / "centers.npy").read_bytes()


def test_a_plan_tells_what_it_will_take_and_writes_nothing(tmp_path, embeddings):
    result = succeed("cluster", embeddings, tmp_path / "centers", *COMMAND, "--plan")
    assert "2700 rows of 16 into 60 clusters: at most 6 passes" in result.stdout
    assert "GiB" in result.stdout
    facts = json.loads(
        call_mlcd("cluster", embeddings, tmp_path / "c", *COMMAND, "--plan", "--json").stdout
    )
    assert facts["flops"] == 2 * 2700 * 60 * 16 * 6
    assert facts["seconds"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--clusters", 3000],
        ["--clusters", 3001, "--hold-out", 0],
        ["--levels", "10,20"],
        ["--clusters", 10, "--balanced", "--largest", 3],
    ],
)
def test_a_plan_refuses_what_the_run_refuses(tmp_path, embeddings, options):
    arguments = ["cluster", embeddings, tmp_path / "centers", *options]
    planned, run = call_mlcd(*arguments, "--plan"), call_mlcd(*arguments)
    assert (planned.returncode, planned.stderr) == (2, run.stderr)


def test_a_plan_refuses_an_output_that_is_taken(tmp_path, embeddings):
    refuse(
        "cluster --clusters 10 --plan",
        embeddings,
        embeddings,
        contains="holds embeddings made from other input",
    )


def test_every_center_comes_with_the_keys_of_its_nearest_members(embeddings, whole, rows):
    centers = Centers.open(whole)
    kept = np.flatnonzero(~EmbeddingsArtifact.open(embeddings).held_out(0.1))
    aligned = centers.align(rows[kept])
    nearest = nearest_centers(aligned, centers.vectors, 1).ids[:, 0]
    cosines = np.einsum(
        "nd,nd->n", aligned.astype(np.float64), centers.vectors[nearest].astype(np.float64)
    )
    for center in range(CLUSTERS):
        members = np.flatnonzero(nearest == center)
        first = members[np.argsort(-cosines[members], kind="stable")][:8]
        examples = centers.examples.of_center(center)
        assert [example.key for example in examples] == [f"{kept[row]:07d}" for row in first]
        assert np.array([example.similarity for example in examples]) == pytest.approx(
            cosines[first], abs=1e-6
        )


def test_no_key_is_kept_where_none_is_wanted(tmp_path, embeddings):
    succeed("cluster", embeddings, tmp_path / "c", "--clusters", 20, "--examples", 0)
    assert Centers.open(tmp_path / "c").examples is None
    assert manifest(tmp_path / "c")["config"]["examples"] == 0


def test_rows_to_audit_look_ups_on_come_with_many_centers(tmp_path, embeddings, whole, rows):
    """The rows are those that were not clustered, if they are enough, as the model gave them."""
    assert Centers.open(whole).audit_rows is None
    for hold_out, unseen in ((0.4, True), (0.1, False)):
        out = tmp_path / str(hold_out)
        options = ("--clusters", 1000, "--iterations", 1, "--subtract-mean", "--hold-out", hold_out)
        succeed("cluster", embeddings, out, *options)
        held_out = EmbeddingsArtifact.open(embeddings).held_out(hold_out)
        expected = rows[held_out] if unseen else rows
        audited = Centers.open(out).audit_rows
        assert audited.dtype == np.float16
        assert (audited == expected.astype(np.float16)).all()


def test_a_sample_is_clustered_where_asked(tmp_path, embeddings):
    out = tmp_path / "centers"
    succeed("cluster", embeddings, out, "--clusters", 20, "--sample", 30, "--hold-out", 0.1)
    assert manifest(out)["summary"]["rows"] == 600
    assert np.load(out / "sizes.npy").sum() == 600
    assert manifest(out)["config"]["sample"] == 30


@pytest.mark.parametrize(
    ("value", "why"), [(np.nan, "holds NaN or Inf"), (0.0, "has no direction")]
)
def test_a_row_that_cannot_be_used_is_named_by_its_key(tmp_path, rows, value, why):
    broken = rows.copy()
    broken[1234, :] = value
    place = write_embeddings(tmp_path / "e", [broken[:1000], broken[1000:]])
    refuse(
        "cluster --clusters 5", place, tmp_path / "centers", contains=f"row 1234 (0001234) {why}"
    )
    assert not (tmp_path / "centers.partial").exists()


# Not ru_maxrss: a child's begins with its parent's, and the test could not fail.
PEAK = r"""
import re, sys
from pathlib import Path
from mlcd.clustering import rows
from mlcd.clustering.kmeans import kmeans
rows._KEPT_BYTES = 0  # as where there are more
kmeans(rows.FileRows(sorted(Path(sys.argv[1]).glob("*.npy"))), 64, iterations=1)
print(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
"""


def test_memory_does_not_grow_with_the_rows(tmp_path):
    def peak_kib(num_rows):
        folder = tmp_path / str(num_rows)
        folder.mkdir()
        generator = np.random.default_rng(0)
        for part in range(num_rows // 25_000):
            np.save(folder / part_name(part), unit_rows(generator.standard_normal((25_000, 64))))
        command = [sys.executable, "-c", PEAK, str(folder)]
        one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        return int(
            subprocess.run(
                command, capture_output=True, text=True, check=True, env=one_thread
            ).stdout
        )

    few, many = peak_kib(50_000), peak_kib(250_000)
    # 200,000 rows more are 50,000 KiB; their last assignment is 800.
    assert many - few < 8_000


PEAK_AND_PLAN = r"""
import re, sys
from pathlib import Path
from mlcd.clustering import kmeans as kmeans_module, rows
from mlcd.clustering.kmeans_plan import plan
kmeans_module.WORTH_COMPILING = 0
num_clusters = int(sys.argv[2])
files = rows.FileRows([Path(sys.argv[1])])
planned = plan(files.num_rows, num_clusters, files.dimension, iterations=1, flops_per_s=1.0)
kmeans_module.kmeans(files, num_clusters, iterations=1)
status = Path("/proc/self/status").read_text()
peak, mapped = (int(re.search(rf"{name}:\s*(\d+)", status)[1]) for name in ("VmHWM", "RssFile"))
print((peak - mapped) * 1024, planned.memory_bytes, planned.library_bytes)
"""


@pytest.mark.slow
def test_a_clustering_takes_no_more_memory_than_is_planned(tmp_path):
    rows = unit_rows(np.random.default_rng(0).standard_normal((33_000, 256), dtype=np.float32))
    np.save(tmp_path / "rows.npy", rows)
    command = [sys.executable, "-c", PEAK_AND_PLAN, str(tmp_path / "rows.npy"), "32768"]
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=no_gpu)
    peak, planned, of_libraries = map(int, said.stdout.split())
    assert planned - of_libraries < peak < planned


def test_the_rows_written_here_are_an_artifact(embeddings, rows):
    assert EmbeddingsArtifact.open(embeddings).load().tobytes() == rows.tobytes()
