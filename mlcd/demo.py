"""The command `mlcd demo`: runs all steps with the public commands, then starts the service.

Every command skips a finished artifact and continues an interrupted one. So the demo stores no
state, and running it again resumes it.
"""

import errno
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table

from mlcd.artifacts.disk import translate_os_errors
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import open_artifact
from mlcd.encoders import open_text_encoder
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.export.starter.artifact import STARTER
from mlcd.export.starter.packages import is_installed as starter_installed
from mlcd.images.sources import open_source
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.pipelines.resolve import resolve_model

_IMAGES_PER_CLUSTER: Final = 12
_MAX_CLUSTERS: Final = 1000
_MIN_DISTINCT: Final = 8
_MANY_CLUSTERS: Final = 500
_INTERRUPTED: Final = 130
_LAST_PORT: Final = 65535
_NUM_QUERIES: Final = 3
_RESULTS_PER_QUERY: Final = 3
_DEFAULT_WORDS: Final = ("people", "an animal", "a building")  # used if the images have no classes


@dataclass(frozen=True)
class Demo:
    """The settings of the demo; `run` builds the artifacts, `serve` serves them."""

    out: Path
    images: str | None = None
    features: str | None = None
    recipe: str | None = None
    seed: int = 0

    def run(self) -> None:
        """Creates or completes every artifact below `out`, then prints the result table.

        If a step fails, exits with the status of that step.
        """
        started = time.monotonic()
        if self.images is None:
            write_digits(self.out / "images")
        _run(["embed", self._images, self._at("features"), "--model", self._features])
        features = EmbeddingsArtifact.open(self.out / "features")
        for command in self.commands(features):
            _run(command)
        self._print_table(time.monotonic() - started)
        if self._features == STARTER:
            _print_search_by_words(features)

    def commands(self, features: EmbeddingsArtifact) -> list[list[str]]:
        """Returns the public commands that follow the first, in order."""
        held_out = features.held_out(HELD_OUT_FRACTION)
        num_clusters = _choose_clusters(features, held_out)
        num_labels = max(1, min(4 if num_clusters < _MANY_CLUSTERS else 8, num_clusters // 4))
        classes = set(features.class_names)
        comparable = (
            None not in classes and len(classes) > 1 and held_out.any() and not held_out.all()
        )
        seed = ["--seed", str(self.seed)]
        clustering = [
            "--clusters",
            str(num_clusters),
            "--hold-out",
            str(HELD_OUT_FRACTION),
            "--subtract-mean",
        ]
        if None not in classes:
            clustering.append("--names")
        recipe = self.recipe or ("demo-digits" if self.images is None else "demo-photos")
        paths = {
            "data.images": self._images,
            "data.labels": self._at("labels"),
            "out": self._at("run"),
        }
        chosen = {**paths, "seed": self.seed, "loss.labels_per_image": num_labels}
        overrides = [f"{name}={value}" for name, value in chosen.items()]
        untrained = str(self.out / "run" / "checkpoints" / "step_000000")
        representations = [self._at("pixels"), self._at("features"), untrained, self._at("run")]
        evaluate = [
            ["evaluate", kind, *representations, "--out", self._at(kind), *options]
            # A user's folder may have duplicates across training and held-out images; --seen counts
            # them instead of failing.
            for kind, options in (("knn", ["--seen"]), ("clusters", seed))
        ]
        by_words = ["--words", "imagenet", "--templates", "plain", "--model", self._features]
        needs_naming = "--names" not in clustering and self._features == STARTER
        return [
            ["embed", self._images, self._at("pixels"), "--model", "pixels"],
            ["cluster", self._at("features"), self._at("centers"), *clustering, *seed],
            *([["name", self._at("centers"), *by_words]] if needs_naming else []),
            [
                "label",
                self._at("features"),
                self._at("labels"),
                "--centers",
                self._at("centers"),
                "--top",
                str(num_labels),
            ],
            ["train", recipe, *overrides],
            *(evaluate if comparable else []),
            ["export", self._at("run"), self._at("model"), "--images", self._images],
            ["export", self._at("model"), self._at("triton"), "--format", "triton"],
            ["embed", self._images, self._at("embeddings"), "--model", self._at("model")],
            [
                "index",
                self._at("embeddings"),
                str(self.out / "collections" / "demo"),
            ],
            ["index", self._at("features"), str(self._features_state / "collections" / "demo")],
            ["verify", str(self.out), "--quiet"],
        ]

    def serve(self, host: str, port: int) -> None:
        """Starts two services, one for the trained model and one for the features, prints their
        addresses and example requests, and waits until both stop.
        """
        trained = ["--model", self._at("model"), "--state", str(self.out)]
        features = ["--model", self._features, "--centers", self._at("centers")]
        features += ["--state", str(self._features_state)]
        try:
            with _serving([*trained, *_address(host, port)]) as (service, model_ready_line):
                features_options = [
                    *features,
                    *_address(host, port + 1 if 0 < port < _LAST_PORT else 0),
                ]
                with _serving(features_options) as (feature_service, features_ready_line):
                    self._print_example_requests(model_ready_line, features_ready_line)
        except KeyboardInterrupt:
            return
        if status := service.returncode or feature_service.returncode:
            sys.exit(status)

    @property
    def _features_state(self) -> Path:
        """State folder of the feature service, whose collection uses another embedding space."""
        return self.out / "features-state"

    def _print_example_requests(self, model_ready_line: str, features_ready_line: str) -> None:
        url, features_url = (
            line.rpartition(" on ")[-1] for line in (model_ready_line, features_ready_line)
        )
        picture = shlex.quote(
            'files=@"{}"'.format(str(self._example()).replace("\\", "\\\\").replace('"', '\\"'))
        )
        words = ", also searchable by text" if self._features == STARTER else ""
        _say(f"{model_ready_line}\n\nthe trained ViT:  {url}/")
        _say(
            f"the features ({Path(self._features).stem}){words}:  {features_url}/\n"
            "\nexample requests:\n"
        )
        _say(f"  curl -s -F {picture} '{url}/v1/labels?top=5'")
        _say(
            f"  curl -s -F {picture} '{url}/v1/collections/demo/search?top=5'\n\nCtrl-C stops both."
        )

    def _at(self, name: str) -> str:
        return str(self.out / name)

    def _example(self) -> Path:
        """Returns the path of the first embedded image; an image in a shard is extracted first."""
        key = EmbeddingsArtifact.open(self.out / "embeddings").keys[0]
        if (path := Path(self._images) / key).is_file():
            return path
        source = open_source(self._images)
        entry = next(entry for entry in source.entries if entry.key == key)
        copy = self.out / "example.image"
        copy.write_bytes(source.read(entry))
        return copy

    @property
    def _features(self) -> str:
        """The model whose features are clustered. The default for the user's images is the starter
        if it is installed; otherwise hog.
        """
        default_model = "hog" if self.images is None or not starter_installed() else STARTER
        return self.features or default_model

    @property
    def _images(self) -> str:
        return self.images if self.images is not None else str(self.out / "images")

    def _print_table(self, seconds: float) -> None:
        display_names = {
            "pixels": "raw pixels 16x16",
            "features": f"features ({Path(self._features).stem})",
            "step_000000": "ViT, untrained",
        }
        records: dict[str, dict[str, float]] = {}
        copies = 0
        for kind in ("knn", "clusters"):
            if (self.out / kind).is_dir():
                artifact = open_artifact(self.out / kind, "evaluation")
                for result in json.loads(artifact.file("results.json").read_text()):
                    records.setdefault(result["representation"], {}).update(result["metrics"])
                    copies = (
                        max(copies, result["seen"]["images"])
                        if kind == "knn" and "seen" in result
                        else copies
                    )
        table = Table(title="k-NN: held-out images. k-means: all images, one cluster per class.")
        for column in ("representation", "k-NN accuracy", "cluster purity", "NMI"):
            table.add_column(column, justify="left" if column == "representation" else "right")
        for name, metrics in records.items():
            values = (metrics[key] for key in ("knn_accuracy", "cluster_purity", "cluster_nmi"))
            table.add_row(
                display_names.get(name, "ViT, trained (MLCD)"),
                *(f"{value:.3f}" for value in values),
            )
        console = Console(width=max(80, Console().width))
        if records:
            console.print()
            console.print(table)
            _say(
                "k-NN accuracy: share of held-out images classified correctly by their nearest"
                " neighbors. Purity, NMI: agreement of clusters with classes.\nHigher is better;"
                " the ViT was trained on clusters of the features, without class labels."
            )
            if copies:
                _say(
                    f"{copies} held-out images are copies of images used for training or"
                    " clustering."
                )
        else:
            _say("\nNo table: a comparison requires the images in one sub-folder per class.")
        _say(f"everything is in {self.out} ({seconds:.0f} s)")


def _print_search_by_words(features: EmbeddingsArtifact) -> None:
    """Prints starter search results for a few class names, or default words without classes."""
    names = sorted({name for name in features.class_names if name is not None})
    words = [name.replace("_", " ") for name in names[:: max(1, len(names) // _NUM_QUERIES)]]
    texts = [f"a photo of {word}" for word in words[:_NUM_QUERIES] or _DEFAULT_WORDS]
    with closing(open_text_encoder(resolve_model(STARTER))) as encoder:
        scores = encoder.encode(encoder.tokenizer(texts)) @ features.load().T
    _say("\ntext search in the starter's features:")
    for text, row in zip(texts, scores, strict=True):
        keys = ", ".join(
            features.keys[int(index)] for index in np.argsort(-row)[:_RESULTS_PER_QUERY]
        )
        _say(f"  {text}: {keys}")


def _address(host: str, port: int) -> list[str]:
    return ["--host", host, "--port", str(free_port(host, port))]


@contextmanager
def _serving(options: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a service; yields it and the line that it prints once model and collections are open.

    If the service ends before it is ready, exits with the service's status; the service has printed
    the reason.
    """
    with _start(["serve", *options], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        if not (line := service.stdout.readline().strip()):
            sys.exit(service.wait())
        yield service, line


def free_port(host: str, port: int) -> int:
    """Returns `port`, or 0 if another program uses it; the service then chooses a free port and
    prints it.

    Raises ConfigInvalid unless `host` is an address of this machine.
    """
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
    ) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return 0
            raise ConfigInvalid(
                f"cannot listen on {host}:{port}", remedy="give another --host or --port"
            ) from error
    return port


def write_digits(folder: Path) -> None:
    """Writes scikit-learn's 1,797 scanned digits as PNG files, one sub-folder per digit. The
    folder appears only when complete.
    """
    if folder.is_dir():
        return
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    with translate_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".images.", dir=folder.parent) as temporary:
            for number, (pixels, digit) in enumerate(
                zip(digits.images, digits.target, strict=True)
            ):
                path = Path(temporary) / "images" / str(digit) / f"{number:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((pixels * 255.0 / 16.0).round().astype(np.uint8)).save(path)
            if not folder.is_dir():  # another demo may have created it meanwhile
                (Path(temporary) / "images").rename(folder)


def _choose_clusters(features: EmbeddingsArtifact, held_out: NDArray[np.bool_]) -> int:
    """Returns the number of clusters: about one per 12 distinct images that are not held out."""
    num_distinct = len({row.tobytes() for row in features.load()[~held_out]})
    if num_distinct < _MIN_DISTINCT:
        raise InvalidInput(
            f"clustering requires at least {_MIN_DISTINCT} different images that are not held out,"
            f" got {num_distinct}",
            remedy="add images",
        )
    return max(2, min(_MAX_CLUSTERS, num_distinct // _IMAGES_PER_CLUSTER))


def _run(command: list[str]) -> None:
    """Runs one step; if it fails, exits with its status. The step has printed the reason."""
    _say(f"\n$ mlcd {shlex.join(command)}")
    with _start(command) as step:
        status = step.wait()
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    if status != 0:
        sys.exit(status)


@contextmanager
def _start(command: list[str], stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Runs a process until it ends; raises KeyboardInterrupt if we received SIGINT or SIGTERM.

    The process runs in its own process group, so Ctrl-C does not reach it; we forward either signal
    as SIGINT so that it saves its work.
    """
    process: subprocess.Popen[str] | None = None
    signaled = False

    def forward_as_sigint(*_: object) -> None:
        nonlocal signaled
        signaled = True
        if process is not None:
            process.send_signal(signal.SIGINT)

    handled_signals = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, forward_as_sigint) for number in handled_signals}
    try:
        arguments = [sys.executable, "-m", "mlcd", *command]
        process = subprocess.Popen(arguments, stdout=stdout, text=True, process_group=0)
        if signaled:
            process.send_signal(signal.SIGINT)
        yield process
        process.wait()
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if signaled:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
