"""`mlcd demo`: the whole journey by the public commands, one after the other, then the service.

Every command leaves a finished artifact alone and goes on with an interrupted one, so the demo is resumable
by running it again: it keeps no state of its own.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from mlcd.artifact import open_artifact, translated_os_errors
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.errors import Conflict, InvalidInput, MlcdError, Unavailable
from mlcd.images.sources import open_source
from mlcd.keys import HELD_OUT_FRACTION

_IMAGES_PER_CLUSTER: Final = 12
_MAX_CLUSTERS: Final = 1000
_MANY_CLUSTERS: Final = 500
_START_TIMEOUT_S: Final = 60.0
_INTERRUPTED: Final = 130


@dataclass(frozen=True)
class Demo:
    """Where the journey goes and what it starts from; `run` and `serve` do it."""

    out: Path
    images: str | None = None
    features: str | None = None
    recipe: str | None = None
    seed: int = 0

    def run(self) -> None:
        """Make or finish every artifact below `out`, then print the result table.

        Raises MlcdError where a step refuses its input.
        """
        started = time.monotonic()
        if self.images is None:
            write_digits(self.out / "images")
        source = open_source(self._images)
        num_images = len(source.entries)
        if num_images == 0:
            raise InvalidInput(f"there are no images in {self._images}", remedy="give a folder that holds some")
        classes = {entry.class_name for entry in source.entries}
        commands = self.commands(num_images, has_classes=None not in classes and len(classes) > 1)
        for number, command in enumerate(commands, start=1):
            _say(f"\n[{number}/{len(commands)}] mlcd {shlex.join(command)}")
            _run(command)
        self._print_table(time.monotonic() - started)

    def commands(self, num_images: int, *, has_classes: bool) -> list[list[str]]:
        """The public commands of the journey, in order."""
        out = self.out
        seed = ["--seed", str(self.seed)]
        num_clustered = num_images - int(HELD_OUT_FRACTION * num_images)
        num_clusters = max(2, min(_MAX_CLUSTERS, num_clustered // _IMAGES_PER_CLUSTER, num_clustered))
        num_labels = 4 if num_clusters < _MANY_CLUSTERS else 8
        clustering = ["--clusters", str(num_clusters), "--hold-out", str(HELD_OUT_FRACTION), "--subtract-mean"]
        if has_classes:
            clustering.append("--names")
        top = ["--top", str(num_labels)]
        places = {"data.images": self._images, "data.labels": out / "labels", "out": out / "run"}
        chosen = {**places, "seed": self.seed, "loss.labels_per_image": num_labels}
        overrides = [f"{name}={value}" for name, value in chosen.items()]
        recipe = self.recipe or ("demo-digits" if self.images is None else "demo-photos")
        step_0 = str(out / "run" / "checkpoints" / "step_000000")
        representations = [str(out / "pixels"), str(out / "features"), step_0, str(out / "run")]
        evaluate = [
            ["evaluate", kind, *representations, "--out", str(out / kind), *seed] for kind in ("knn", "clusters")
        ]
        return [
            ["embed", self._images, str(out / "features"), "--model", self.features or "hog"],
            ["embed", self._images, str(out / "pixels"), "--model", "pixels"],
            ["cluster", str(out / "features"), str(out / "centers"), *clustering, *seed],
            ["label", str(out / "features"), str(out / "labels"), "--centers", str(out / "centers"), *top],
            ["train", recipe, *overrides],
            *(evaluate if has_classes else []),
            ["export", str(out / "run"), str(out / "model"), "--images", self._images],
            ["export", str(out / "model"), str(out / "triton"), "--format", "triton"],
            ["embed", self._images, str(out / "embeddings"), "--model", str(out / "model")],
            ["index", str(out / "embeddings"), str(out / "collections" / "demo")],
            ["verify", str(out), "--quiet"],
        ]

    def serve(self, host: str, port: int) -> None:
        """Start the service, print the URL and a curl line when it is ready, wait until it is stopped."""
        command = ["serve", "--model", str(self.out / "model"), "--state", str(self.out)]
        process = subprocess.Popen(_mlcd([*command, "--host", host, "--port", str(port)]))
        try:
            url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"  # noqa: S104 - compared only
            if not _wait_until_ready(url, process):
                raise Conflict(f"the service did not start on port {port}", remedy="see the line above")
            picture = shlex.quote(f"files=@{self._example()}")
            _say(f"\nopen {url}/ or ask:\n\n  curl -s -F {picture} '{url}/v1/labels?top=5'")
            _say(f"  curl -s -F {picture} '{url}/v1/collections/demo/search?top=5'\n\nCtrl-C stops it.")
            process.wait()
        except KeyboardInterrupt:
            pass
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()

    def _example(self) -> Path:
        """A file to send: the first image that could be used, unpacked where it lies in a shard."""
        key = EmbeddingsArtifact.open(self.out / "embeddings").keys[0]
        if (path := Path(self._images) / key).is_file():
            return path
        source = open_source(self._images)
        entry = next(entry for entry in source.entries if entry.key == key)
        copy = self.out / "example.image"
        copy.write_bytes(source.read(entry))
        return copy

    @property
    def _images(self) -> str:
        return self.images if self.images is not None else str(self.out / "images")

    def _print_table(self, seconds: float) -> None:
        shown = {
            "pixels": "raw pixels 16x16",
            "features": f"features ({Path(self.features).stem if self.features else 'hog'})",
            "step_000000": "ViT, untrained",
        }
        records: dict[str, dict[str, float]] = {}
        for kind in ("knn", "clusters"):
            if (self.out / kind).is_dir():
                artifact = open_artifact(self.out / kind, "evaluation")
                for result in json.loads(artifact.file("results.json").read_text()):
                    records.setdefault(result["representation"], {}).update(result["metrics"])
        table = Table(title="k-NN on held-out images; k-means with as many clusters as classes, on all")
        for column in ("representation", "k-NN accuracy", "cluster purity", "NMI"):
            table.add_column(column, justify="left" if column == "representation" else "right")
        for name, metrics in records.items():
            values = (metrics[key] for key in ("knn_accuracy", "cluster_purity", "cluster_nmi"))
            table.add_row(shown.get(name, "ViT, trained (MLCD)"), *(f"{value:.3f}" for value in values))
        console = Console(width=max(80, Console().width))
        if records:
            console.print()
            console.print(table)
        else:
            _say("\nNo table: the images are not in one sub-folder per class, so there is nothing to compare with.")
        _say(f"everything is in {self.out} ({seconds:.0f} s)")


def write_digits(folder: Path) -> None:
    """scikit-learn's 1,797 scanned digits as PNG files, one sub-folder per digit; whole or not at all."""
    if folder.is_dir():
        return
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    temporary = folder.with_name(f"{folder.name}.partial")
    with translated_os_errors(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            path = temporary / str(digit) / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 255.0 / 16.0).round().astype(np.uint8)).save(path)
        temporary.rename(folder)


def _run(command: list[str]) -> None:
    """A step's own message has told what is wrong; here only its exit status is passed on."""
    process = subprocess.Popen(_mlcd(command))
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # the terminal's Ctrl-C went to the step as well: let it save what it has
        raise
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    if status != 0:
        raise StepFailed(command[0], status)


class StepFailed(MlcdError):
    """A step of the demo refused its work and has said why."""

    def __init__(self, step: str, status: int) -> None:
        super().__init__(f"the demo stopped at `mlcd {step}` (exit status {status})", remedy="mend it and run again")


def _mlcd(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "mlcd", *arguments]


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=2):  # noqa: S310 - our own server
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    if process.poll() is None:
        raise Unavailable(f"the service is not ready after {_START_TIMEOUT_S:.0f} s", remedy="see its messages above")
    return False


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
