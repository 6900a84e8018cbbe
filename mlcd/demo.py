"""The command `mlcd demo`: the whole journey by the public commands, one after the other, then the
service.

Every command leaves a finished artifact alone and continues an interrupted one. So the demo keeps
no state of its own and is resumed by running it again.
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
_NUM_WORDS: Final = 3
_NUM_FOUND: Final = 3
_WORDS: Final = ("people", "an animal", "a building")  # where no class is known


@dataclass(frozen=True)
class Demo:
    """The journey: its output, its input, and `run` and `serve` to perform it."""

    out: Path
    images: str | None = None
    features: str | None = None
    recipe: str | None = None
    seed: int = 0

    def run(self) -> None:
        """Makes or finishes every artifact below `out`, then prints the result table.

        It exits with the status of a step that refuses its input.
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
        kept_out = features.held_out(HELD_OUT_FRACTION)
        num_clusters = _choose_clusters(features, kept_out)
        num_labels = max(1, min(4 if num_clusters < _MANY_CLUSTERS else 8, num_clusters // 4))
        classes = set(features.class_names)
        comparable = (
            None not in classes and len(classes) > 1 and kept_out.any() and not kept_out.all()
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
            # A user's folder may hold copies of an image on both sides; they are counted and do not
            # stop the demo.
            for kind, options in (("knn", ["--seen"]), ("clusters", seed))
        ]
        by_words = ["--words", "imagenet", "--templates", "plain", "--model", self._features]
        is_named = "--names" in clustering or self._features != STARTER
        return [
            ["embed", self._images, self._at("pixels"), "--model", "pixels"],
            ["cluster", self._at("features"), self._at("centers"), *clustering, *seed],
            *([] if is_named else [["name", self._at("centers"), *by_words]]),
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
            ["index", self._at("features"), str(self._state_of_features / "collections" / "demo")],
            ["verify", str(self.out), "--quiet"],
        ]

    def serve(self, host: str, port: int) -> None:
        """Serves both spaces, the trained model's and beside it that of the features, prints their
        addresses and a curl line, and waits until they are stopped.
        """
        trained = ["--model", self._at("model"), "--state", str(self.out)]
        features = ["--model", self._features, "--centers", self._at("centers")]
        features += ["--state", str(self._state_of_features)]
        try:
            with _serving([*trained, *_address(host, port)]) as (service, served):
                beside = [*features, *_address(host, port + 1 if 0 < port < _LAST_PORT else 0)]
                with _serving(beside) as (feature_service, served_too):
                    self._print_how_to_ask(served, served_too)
        except KeyboardInterrupt:
            return
        if status := service.returncode or feature_service.returncode:
            sys.exit(status)

    @property
    def _state_of_features(self) -> Path:
        """The state of the server of the features, whose collection is of another space."""
        return self.out / "features-state"

    def _print_how_to_ask(self, served: str, served_too: str) -> None:
        url, url_of_features = (line.rpartition(" on ")[-1] for line in (served, served_too))
        picture = shlex.quote(
            'files=@"{}"'.format(str(self._example()).replace("\\", "\\\\").replace('"', '\\"'))
        )
        words = ", where words search too" if self._features == STARTER else ""
        _say(f"{served}\n\nthe trained ViT:  {url}/")
        _say(f"the features ({Path(self._features).stem}){words}:  {url_of_features}/\n\nor ask:\n")
        _say(f"  curl -s -F {picture} '{url}/v1/labels?top=5'")
        _say(
            f"  curl -s -F {picture} '{url}/v1/collections/demo/search?top=5'\n\nCtrl-C stops both."
        )

    def _at(self, name: str) -> str:
        return str(self.out / name)

    def _example(self) -> Path:
        """Returns a file to send: the first usable image, unpacked where it is in a shard."""
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
        """The model whose features are clustered: for photographs the starter, where it is."""
        stand_in = "hog" if self.images is None or not starter_installed() else STARTER
        return self.features or stand_in

    @property
    def _images(self) -> str:
        return self.images if self.images is not None else str(self.out / "images")

    def _print_table(self, seconds: float) -> None:
        shown = {
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
        table = Table(
            title="k-NN on held-out images; k-means with as many clusters as classes, on all"
        )
        for column in ("representation", "k-NN accuracy", "cluster purity", "NMI"):
            table.add_column(column, justify="left" if column == "representation" else "right")
        for name, metrics in records.items():
            values = (metrics[key] for key in ("knn_accuracy", "cluster_purity", "cluster_nmi"))
            table.add_row(
                shown.get(name, "ViT, trained (MLCD)"), *(f"{value:.3f}" for value in values)
            )
        console = Console(width=max(80, Console().width))
        if records:
            console.print()
            console.print(table)
            _say(
                "k-NN: held-out images whose nearest others are of their class. Purity, NMI: how"
                " far clusters are classes.\nHigher is better; the ViT was trained on clusters of"
                " the features and saw no class."
            )
            if copies:
                _say(
                    f"{copies} of the held-out images are copies of ones that were trained on or"
                    " clustered."
                )
        else:
            _say(
                "\nNo table: the images are not in one sub-folder per class, so there is nothing to"
                " compare with."
            )
        _say(f"everything is in {self.out} ({seconds:.0f} s)")


def _print_search_by_words(features: EmbeddingsArtifact) -> None:
    """Prints the images that the starter finds by a few words: names of classes where there are
    any.
    """
    names = sorted({name for name in features.class_names if name is not None})
    words = [name.replace("_", " ") for name in names[:: max(1, len(names) // _NUM_WORDS)]]
    texts = [f"a photo of {word}" for word in words[:_NUM_WORDS] or _WORDS]
    with closing(open_text_encoder(resolve_model(STARTER))) as encoder:
        scores = encoder.encode(encoder.tokenizer(texts)) @ features.load().T
    _say("\nby words, among the features of the starter:")
    for text, row in zip(texts, scores, strict=True):
        keys = ", ".join(features.keys[int(at)] for at in np.argsort(-row)[:_NUM_FOUND])
        _say(f"  {text}: {keys}")


def _address(host: str, port: int) -> list[str]:
    return ["--host", host, "--port", str(free_port(host, port))]


@contextmanager
def _serving(options: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a service, and yields it with the line that it prints when model and collections are
    open. Exits with its status where it ends before that: it has printed why.
    """
    with _start(["serve", *options], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        if not (line := service.stdout.readline().strip()):
            sys.exit(service.wait())
        yield service, line


def free_port(host: str, port: int) -> int:
    """Returns `port`, or 0 where another program has it; the service then takes a free port and
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
    """Writes scikit-learn's 1,797 scanned digits as PNG files, one sub-folder per digit; whole or
    not at all.
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
            if not folder.is_dir():  # another demo may have been faster
                (Path(temporary) / "images").rename(folder)


def _choose_clusters(features: EmbeddingsArtifact, kept_out: NDArray[np.bool_]) -> int:
    """Returns about one cluster for every 12 different images that may be clustered."""
    distinct = len({row.tobytes() for row in features.load()[~kept_out]})
    if distinct < _MIN_DISTINCT:
        raise InvalidInput(
            f"{distinct} different images are too few to cluster",
            remedy=f"give at least {_MIN_DISTINCT} besides those held out",
        )
    return max(2, min(_MAX_CLUSTERS, distinct // _IMAGES_PER_CLUSTER))


def _run(command: list[str]) -> None:
    """Runs one step; where it fails, it has printed why, and its exit status becomes ours."""
    _say(f"\n$ mlcd {shlex.join(command)}")
    with _start(command) as step:
        status = step.wait()
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    if status != 0:
        sys.exit(status)


@contextmanager
def _start(command: list[str], stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Runs a process until it ends; raises KeyboardInterrupt where we received SIGINT or SIGTERM.

    Only we send it the signal, as SIGINT, so that it saves its work: it is in a process group of
    its own, which the terminal's Ctrl-C does not reach.
    """
    process: subprocess.Popen[str] | None = None
    signaled = False

    def pass_on(*_: object) -> None:
        nonlocal signaled
        signaled = True
        if process is not None:
            process.send_signal(signal.SIGINT)

    heard = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, pass_on) for number in heard}
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
