"""Adds an int8 graph to a model artifact, and measures it on the user's images."""

import hashlib
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import MANIFEST, Artifact, Request, open_artifact
from mlcd.cores import available_cores
from mlcd.encoders.encoder import Precision
from mlcd.encoders.openvino import (
    INT8_GRAPH,
    INT8_WEIGHTS,
    ONNX,
    OpenVinoEncoder,
    check_precision,
    read_int8,
    read_onnx,
)
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput
from mlcd.export.int8_agreement import MIN_MEAN_COSINE, Int8Agreement, compare_rows
from mlcd.export.int8_graph import quantize_graph, quantizer_versions, require_nncf, write_int8
from mlcd.images.entries import Entries
from mlcd.images.prefetch import prepare_all
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import HELD_OUT_FRACTION, split_positions
from mlcd.pipelines.encoded import check_source, images_parent
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Meter, Reporter
from mlcd.types import Embeddings, ImageBatch

NUM_IMAGES: Final = 256
MIN_HELD_OUT: Final = 16  # statistics of fewer images are meaningless
_CENTERS: Final = "centers"
_INT8_FILES: Final = (INT8_GRAPH, INT8_WEIGHTS)
_FACT_PREFIX: Final = "int8_"  # of our fields of the summary


def quantize_model(
    spec: str,
    images: str,
    out: Path,
    *,
    centers: Path | None = None,
    num: int = NUM_IMAGES,
    min_cosine: float = MIN_MEAN_COSINE,
    announce: Callable[[str], None] = lambda _: None,
    reporter: Reporter,
) -> Artifact:
    """Writes the model artifact of `spec` with an int8 graph in addition to its own.

    The fingerprint stays, as it does not depend on the precision. num: maximum number of images to
    calibrate on, and of held-out images to measure on. centers: centers whose labels are compared;
    None uses the model's own, if any. Raises ConfigInvalid, and publishes nothing, if the mean
    cosine to fp32 is below `min_cosine`.
    """
    model = _open_model(spec, resolve_model(spec, announce))
    source = open_source(images)
    check_source(source, out)
    label_centers = _open_centers(model, centers)
    parents = [model.as_parent_of(out, "model"), images_parent(source, out)]
    if centers is not None and label_centers is not None:
        parents.append(label_centers.as_parent_of(out, "centers"))
    config = {**model.config, "int8_images": num}
    request = Request("model", config, tuple(parents), model.fingerprint)
    if (done := find_published(out, request)) is not None:
        Int8Agreement.from_manifest(done.summary).check(spec, min_cosine)
        return done
    check_precision("int8")
    require_nncf()
    with Draft(out, request) as draft:
        quantization = _Quantization(
            model, source, None if label_centers is None else Centers.read(label_centers)
        )
        # prefix and suffix mark leftovers of a killed writer, which the next attempt removes
        with TemporaryDirectory(dir=draft.path, prefix=".int8-", suffix=".tmp") as temporary:
            facts = quantization.write(Path(temporary), num, reporter)
            facts.agreement.check(spec, min_cosine)
            for name in _INT8_FILES:
                with draft.write(name) as path:
                    (Path(temporary) / name).replace(path)
        _copy_model(model, draft)
        summary = {
            key: value for key, value in model.summary.items() if not key.startswith(_FACT_PREFIX)
        }
        return draft.publish(summary={**summary, **facts.summary()})


def _open_model(spec: str, path: str) -> Artifact:
    if not (Path(path) / MANIFEST).is_file():
        raise ConfigInvalid(
            f"quantization needs an exported model, got {spec}",
            remedy="give a directory made by `mlcd export`, or weights that it accepts",
        )
    model = open_artifact(Path(path), "model")
    if model.fingerprint is None:
        raise ArtifactInvalid(f"{spec} lacks a fingerprint", remedy="export the model again")
    return model


def _open_centers(model: Artifact, path: Path | None) -> Artifact | None:
    """Returns the centers at `path`, or else the model's own; None without either."""
    if path is None:
        own = _CENTERS in model.children
        return open_artifact(model.path / _CENTERS, _CENTERS) if own else None
    centers = open_artifact(path, _CENTERS)
    if centers.fingerprint != model.fingerprint:
        raise ConfigInvalid(
            f"{path} and {model.path} must be of the same model",
            remedy="cluster embeddings of this model, or leave out --centers",
        )
    return centers


def _copy_model(model: Artifact, draft: Draft) -> None:
    """Copies the model except an earlier int8 graph."""
    for name in model.files.keys() - {*_INT8_FILES}:
        if not draft.has(name):
            with draft.write(name) as path:
                shutil.copyfile(model.file(name), path)
    for name in model.children:
        draft.adopt(name, model.path / name)


@dataclass(frozen=True)
class _Facts:
    """The facts about an int8 graph for the manifest.

    num, digest: number and digest of the calibration images. agreement: agreement with fp32.
    """

    num: int
    digest: str
    agreement: Int8Agreement

    def summary(self) -> dict[str, object]:
        return {
            "int8_calibration_images": self.num,
            "int8_calibration_digest": self.digest,
            **self.agreement.summary(),
            **quantizer_versions(),
        }


@dataclass(frozen=True)
class _PreparedImages:
    """The usable images of a set: prepared pixels, and the SHA-256 of their files."""

    images: ImageBatch
    sha256: list[bytes]

    def digest(self) -> str:
        return hashlib.sha256(b"".join(self.sha256)).hexdigest()


class _Quantization:
    """Quantizes a model with images, and compares its labels by centers, if any."""

    def __init__(self, model: Artifact, source: Source, centers: Centers | None) -> None:
        self._model, self._source, self._centers = model, source, centers
        self._spec = PreprocessSpec.read(model.file("preprocess.json"))

    def write(self, folder: Path, num: int, reporter: Reporter) -> _Facts:
        """Writes the int8 graph to `folder`, and measures it in the engine that will serve it."""
        calibration, held_out = choose(self._source.entries, num)
        with reporter.stage("images", len(calibration) + len(held_out)) as meter:
            calibration_pixels, held_out_pixels = (
                self._read(self._source.entries.select(indices), meter)
                for indices in (calibration, held_out)
            )
        with reporter.stage("quantize", None):
            graph = quantize_graph(read_onnx(self._model.file(ONNX)), calibration_pixels.images)
            write_int8(graph, folder)
        with reporter.stage("compare", 2 * len(held_out_pixels.images)) as meter:
            fp32_rows = self._encode("fp32", self._model.path / ONNX, held_out_pixels.images)
            meter.advance(len(fp32_rows))
            int8_rows = self._encode("int8", folder / INT8_GRAPH, held_out_pixels.images)
            meter.advance(len(int8_rows))
        agreement = compare_rows(fp32_rows, int8_rows, self._centers)
        return _Facts(len(calibration_pixels.images), calibration_pixels.digest(), agreement)

    def _read(self, entries: Entries, meter: Meter) -> _PreparedImages:
        """Reads the usable images. Raises InvalidInput for fewer than MIN_HELD_OUT."""
        pixels, sha256 = list[NDArray[np.uint8]](), list[bytes]()
        reading = prepare_all(self._source, entries, self._spec, num_threads=available_cores())
        for done, prepared in enumerate(reading, 1):
            if prepared.pixels is not None:
                pixels.append(prepared.pixels)
                sha256.append(prepared.sha256)
            meter.advance(1, errors=done - len(pixels))
        if len(pixels) < MIN_HELD_OUT:
            raise InvalidInput(
                f"quantization needs {MIN_HELD_OUT} usable images, got {len(pixels)} of the"
                f" {len(entries)} images of {self._source.location}",
                remedy="give more images that are typical of the model's input",
            )
        return _PreparedImages(np.stack(pixels), sha256)

    def _encode(self, precision: Precision, graph: Path, images: ImageBatch) -> Embeddings:
        read = read_int8 if precision == "int8" else read_onnx
        encoder = OpenVinoEncoder(
            read(graph), name="", fingerprint="", preprocess=self._spec, precision=precision
        )
        with closing(encoder):
            return encoder.encode(images)


def choose(entries: Entries, num: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the indices of images to calibrate on and to measure on, at most `num` of each.

    The images to measure on are those that every step holds out: a fifth of each class, by hash of
    the key, and at least MIN_HELD_OUT. Raises InvalidInput for too few images.
    """
    if len(entries) < 2 * MIN_HELD_OUT:
        raise InvalidInput(
            f"quantization needs at least {2 * MIN_HELD_OUT} images, got {len(entries)}",
            remedy="give more images",
        )
    positions = split_positions(entries.keys(), entries.class_names())
    order = np.argsort(positions, kind="stable")
    held_out = max(MIN_HELD_OUT, int((positions <= HELD_OUT_FRACTION).sum()))
    return order[held_out:][:num], order[:held_out][:num]
