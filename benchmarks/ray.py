"""The cost of Ray: `mlcd label --on ray` beside `mlcd label` by as many processes of this machine.

    python benchmarks/ray.py ../shared/data/tiny_imagenet_pretrain/'*.tar' --model starter

Both label the same images by the same centers, in turns, `--rounds` times each; the cluster of this
machine alone runs before the first. Prints the seconds of whole commands, the ratio of the least of
each, and that the labels are the same. The bar is a ratio of 1.15.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click
import numpy as np

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.encoders import open_encoder
from mlcd.pipelines.resolve import resolve_model
from mlcd.types import unit_rows

_STORE_BYTES = 256 << 20
_BAR = 1.15


@click.command()
@click.argument("images")
@click.option("--model", default="starter", show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--clusters", default=1000, show_default=True)
@click.option("--rounds", default=2, show_default=True)
def main(images: str, model: str, workers: int, clusters: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, cluster(workers, folder) as address:
        made = Path(folder)
        write_centers(made / "centers", model, clusters)
        given = ("label", images, "--centers", made / "centers", "--model", model)
        ways = {"processes": {}, "ray": {"RAY_ADDRESS": address}}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        digests = set()
        for number in range(rounds):
            for way, environment in ways.items():
                out = made / f"{way}-{number}"
                on = ("--on", "ray") if environment else ()
                began = time.perf_counter()
                run(*given, out, "--workers", workers, *on, **environment)
                seconds[way].append(time.perf_counter() - began)
                artifact = open_artifact(out)
                digests.add(artifact.digest)
                num = artifact.summary["images"]
                print(f"{way}, {num} images: {seconds[way][-1]:.1f} s", flush=True)
    ratio = min(seconds["ray"]) / min(seconds["processes"])
    print(f"ray / processes {ratio:.3f} (bar {_BAR}); {len(digests)} digest")
    sys.exit(ratio > _BAR or len(digests) > 1)


def write_centers(out: Path, model: str, num: int) -> None:
    """Writes random centers: the work does not depend on where they are."""
    with closing(open_encoder(resolve_model(model))) as encoder:
        rows = np.random.default_rng(0).standard_normal((num, encoder.dimension), np.float32)
        with Draft(out, Request("centers", fingerprint=encoder.fingerprint)) as draft:
            Centers(unit_rows(rows), np.ones(num, np.int64), encoder.fingerprint).write(draft)
            draft.publish()


def run(*arguments: object, **environment: str) -> None:
    command = [sys.executable, "-P", "-m", "mlcd", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, **environment})  # noqa: TID251


@contextmanager
def cluster(num_cpus: int, folder: str) -> Iterator[str]:
    """Yields the address of a cluster of one node, which asks for the token of our commands."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(token, RAY_TMPDIR=folder)  # noqa: TID251
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--num-cpus={num_cpus}", f"--object-store-memory={_STORE_BYTES}", f"--port={port}"]
    options += ["--include-dashboard=false", "--disable-usage-stats"]
    # -P: this file has the name of the package
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    node = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"127.0.0.1:{port}"
    finally:
        node.terminate()
        node.wait()


def wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    sys.exit("the node of Ray does not listen")


if __name__ == "__main__":
    main()
