"""Each extra brings what docs/how-to/install.md promises for it: in an environment with that extra
alone, every command of its row runs on eight images.
"""

import json
import re
import shlex
import tomllib
import urllib.error
import urllib.request

import lance
import numpy as np
import pyarrow as pa
import pytest

from tests.conftest import free_port
from tests.installs.conftest import NUM_IMAGES, ROOT, write_images

EMBED = "mlcd embed photos emb --model {model}"
AFTER = (
    "mlcd cluster emb centers --clusters 2 --subtract-mean",
    "mlcd label emb labels --centers centers",
    "mlcd clusters update centers emb updated",
    "mlcd name centers --set names.json",
    "mlcd index emb state/collections/photos",
    "mlcd curate emb selection --issues all --duplicates 0.9999",
    "mlcd extract selection chosen --as tar",
    "mlcd sync labels copy",
    "mlcd verify .",
    "mlcd doctor",
)
TRAIN = "train tiny.yaml data.images=photos data.labels=labels out=run"
TINY = """
model: {image_size: 16, patch_size: 8, width: 32, depth: 2, heads: 2, mlp_width: 64, embedding_dim: 16}
loss: {labels_per_image: 1}
augment: {flip: 0.0}
optim: {warmup_steps: 1}
schedule: {steps: 4, batch_size: 4}
checkpoint: {every_steps: 4}
"""
PIXELS = EMBED.format(model="pixels")
CLUSTERED = (PIXELS, *AFTER[:2])
# Commands that end well; after `!` those that need a server or a store which is not there, and say so.
COMMANDS = {
    (): (PIXELS, *AFTER),
    ("serve", "starter"): (
        EMBED.format(model="starter"),
        *AFTER,
        "mlcd label photos labels-of-photos --centers centers --model starter",
        "mlcd name centers --words words.txt --model starter",
        "mlcd keys create ann --file keys.jsonl",
        "mlcd worker --help",
        "mlcd explore photos --once --state explored",
        "mlcd serve --model starter --centers centers --state state",
    ),
    ("serve",): (
        *CLUSTERED,
        "mlcd keys create ann --file keys.jsonl",
        "mlcd worker --help",
        "mlcd serve --model pixels --centers centers --state state",
    ),
    ("train",): (
        EMBED.format(model="hog"),
        *AFTER[:2],
        f"mlcd {TRAIN}",
        "mlcd evaluate clusters emb",
        "mlcd export run model",
        "mlcd embed photos again --model model",
    ),
    ("train", "tensorboard"): (*CLUSTERED, f"mlcd {TRAIN} telemetry.tensorboard=true"),
    # without a GPU by the library's decoder for CPUs
    ("train", "train-gpu"): (*CLUSTERED, f"mlcd {TRAIN} data.decode=device device=cpu"),
    ("serve", "train"): ("mlcd demo --no-serve",),
    ("compiled",): CLUSTERED,
    ("gpu",): ("mlcd import rows.npy emb --model-name theirs", *AFTER[:2], "mlcd index emb items"),
    ("lance",): ("mlcd import v.lance emb --model-name theirs", *AFTER[:2]),
    ("models",): (*CLUSTERED, "!mlcd export photos model"),  # they are not a model
    ("layout",): (
        "mlcd embed many emb --model pixels",
        "mlcd index emb items --layout tsne",
    ),
    ("quantize", "starter"): (
        "mlcd export starter model",
        "!mlcd quantize model many int8 --num 16",  # where the CPU computes no int8
    ),
    ("heif",): (PIXELS,),
    ("client",): ("!mlcd jobs list",),
    ("redis", "serve"): (
        *CLUSTERED,
        "!env MLCD_REDIS_URL=redis://127.0.0.1:1/0 mlcd worker --model pixels --state state",
    ),
    ("serve", "triton"): (
        "!env MLCD_ENGINE=triton MLCD_TRITON__URL=127.0.0.1:1 mlcd serve --model vit --port 0",
    ),
    ("serve", "tracing"): (
        *CLUSTERED,
        "env MLCD_TRACING__ENDPOINT=http://127.0.0.1:1 mlcd serve --model pixels --centers centers",
    ),
    ("hub", "train"): ("!mlcd embed photos emb --model hub:mlcd/missing",),
    ("ray",): (
        f"{PIXELS} --on ray",
        "mlcd cluster emb centers --clusters 2 --on ray",
        "mlcd label emb labels --centers centers --on ray",
    ),
    ("s3",): (PIXELS, "!mlcd sync emb s3://bucket/emb"),
    ("gcs",): (PIXELS, "!mlcd sync emb gs://bucket/emb"),
    ("azure",): (PIXELS, "!mlcd sync emb az://bucket/emb"),
    ("hf",): (PIXELS, "!mlcd sync emb hf://datasets/missing/emb"),
    ("urls",): ("!mlcd embed links.txt emb --model pixels --urls",),
    ("postgres",): (PIXELS, "!mlcd index emb postgresql://127.0.0.1:1/mlcd/items"),
    ("milvus",): (PIXELS, "!mlcd index emb milvus://127.0.0.1:1/items"),
    ("text",): CLUSTERED,
}
QUICK = ((), ("serve", "starter"))
MISSING = re.compile(r"pip install|not installed|No module named", re.IGNORECASE)


@pytest.mark.parametrize(
    "extras",
    [
        pytest.param(
            extras,
            id=",".join(extras) or "none",
            marks=() if extras in QUICK else pytest.mark.installs,
        )
        for extras in COMMANDS
    ],
)
def test_an_extra_brings_what_its_commands_need(extras, installation):
    installed = installation(*extras)
    work = installed.work
    (work / "tiny.yaml").write_text(TINY)
    (work / "names.json").write_text('{"0": "dark"}')
    (work / "words.txt").write_text("a dark photo\na light photo\n")
    (work / "links.txt").write_text("http://127.0.0.1:1/a.png\n")
    if any("v.lance" in line for line in COMMANDS[extras]):
        vectors = np.random.default_rng(0).standard_normal((30, 8))
        lance.write_dataset(pa.table({"vector": list(vectors)}), work / "v.lance")
    if any("rows.npy" in line for line in COMMANDS[extras]):  # so many that FAISS searches them
        vectors = np.random.default_rng(0).standard_normal((60_000, 8)).astype(np.float32)
        np.save(work / "rows.npy", vectors)
    if any(" many " in line for line in COMMANDS[extras]):
        write_images(work / "many", 120)
    status, listed = installed.run("mlcd", "--help")
    assert status == 0, listed
    for line in COMMANDS[extras]:
        check(installed, line)
    if "emb" in {path.name for path in work.iterdir()}:
        facts = json.loads((work / "emb" / "manifest.json").read_text())
        assert facts["kind"] == "embeddings"


def check(installed, line):
    fails = line.startswith("!")
    command = shlex.split(line.removeprefix("!"))
    settings = dict(word.split("=", 1) for word in command[1 : command.index("mlcd")])
    command = command[command.index("mlcd") :]
    if command[1] == "serve" and not fails:
        answers_with_labels(installed, command, settings)
        return
    status, output = installed.run(*command, settings=settings)
    assert (status != 0) == fails, f"{line}: {output}"
    if fails:
        assert not MISSING.search(output), f"{line}: {output}"
        assert "mlcd: " in output  # one line of ours; gcsfs logs the tracebacks of its own attempts


def answers_with_labels(installed, command, settings):
    """Starts the server and asks for the labels of one image."""
    port = free_port()
    process = installed.start(*command, "--port", port, settings=settings)
    try:
        first = process.stdout.readline()
        assert "serving" in first, first + process.communicate(timeout=60)[0]
        image = next((installed.work / "photos").rglob("*.png")).read_bytes()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/labels", image, {"Content-Type": "image/png"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["results"][0]["labels"]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_python_does_what_the_commands_do_without_extras(bare):
    code = (
        "import mlcd; photos = mlcd.embed('photos', model='pixels');"
        "centers = mlcd.cluster(photos.vectors, 2, subtract_mean=True);"
        "print(mlcd.label(photos.vectors, centers, top=1).ids.shape);"
        "mlcd.index(photos.vectors)"
    )
    (bare.work / "journey.py").write_text(code)
    status, output = bare.run("journey")
    assert (status, output) == (0, f"({NUM_IMAGES}, 1)\n")


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("mlcd serve --model pixels", "serve"),
        ("mlcd explore photos --once", "serve"),
        ("mlcd worker", "serve"),
        ("mlcd keys list", "serve"),
        ("mlcd jobs list", "client"),
        ("mlcd train tiny.yaml", "train"),
        ("mlcd demo --no-serve", "train"),
        ("mlcd embed photos emb --model hog", "train"),
        ("mlcd export starter model", "starter"),
        ("mlcd sync photos s3://bucket/photos", "s3"),
    ],
)
def test_a_command_without_its_packages_names_the_extra_of_the_same_wheel(line, extra, bare, wheel):
    status, output = bare.run(*line.split())
    assert status == 2
    assert f"pip install 'mlcd[{extra}] @ {wheel.as_uri()}'" in output
    assert output.count("\n") == 1


@pytest.fixture(scope="module")
def bare(installation):
    installed = installation()
    (installed.work / "tiny.yaml").write_text(TINY)
    return installed


def rows():
    """Returns the words of install.md for each extra; of none under the empty name."""
    text = (ROOT / "docs" / "how-to" / "install.md").read_text()
    table = re.findall(r"^\| (\(none\)|`.+?) \| (.+) \|$", text, re.MULTILINE)
    return {
        extra: words for names, words in table for extra in re.findall(r"`([\w-]+)`", names) or [""]
    }


def test_the_page_tells_all_extras_and_each_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert set(rows()) == extras | {""}
    assert {extra for each in COMMANDS for extra in each} == extras


def test_every_command_that_the_page_promises_is_tried():
    for extra, words in rows().items():
        tried = [line for each in COMMANDS if extra in (each or ("",)) for line in COMMANDS[each]]
        for promised in re.findall(r"`(mlcd [^`]+)`", words):
            assert any(promised in line for line in tried), promised
