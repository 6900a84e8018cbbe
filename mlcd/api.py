"""The package's Python interface: each function does the work of the command of its name.

Paths go in and artifacts come out where `out` is given; without it the result stays in memory.
Arrays come out as NumPy arrays; torch tensors and lists go in as well. Shapes: N rows, K centers, Q
queries, D dimension, L labels of a row.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers
from mlcd.collections.collection import Collection
from mlcd.encoders import open_encoder, open_text_encoder
from mlcd.encoders.encoder import Encoder, EngineName, Precision
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.errors import ConfigInvalid, ImageRejected, InvalidInput, TextRejected
from mlcd.image_bytes import ImageInput, check_images, image_bytes
from mlcd.images.decode import DEFAULT_LIMITS, ExifPolicy
from mlcd.images.quiet import silence_decoders
from mlcd.images.sources import open_source
from mlcd.images.transform import DecodeMode
from mlcd.indexes.scan import scan
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.locations import Location, artifact_path, local_path
from mlcd.pipelines import cluster as clustering
from mlcd.pipelines import embed as embedding
from mlcd.pipelines import embed_texts as text_embedding
from mlcd.pipelines import index as indexing
from mlcd.pipelines import label as labeling
from mlcd.pipelines.resolve import resolve_model
from mlcd.pipelines.text_files import MAX_CHARS, read_texts
from mlcd.progress import Reporter
from mlcd.text_checks import check_text
from mlcd.types import (
    Embeddings,
    Fingerprint,
    SampleKey,
    ShortRepr,
    as_array,
    cosines,
    least_product,
    unit_rows,
)

if TYPE_CHECKING:  # it needs the package tokenizers, which images do not
    from mlcd.encoders.text_encoder import TextEncoder

_BATCH: Final = MAX_BATCH  # images that are decoded and in memory at a time


class Model:
    """An opened encoder of images and, where the model has a text tower, of texts.

    It is a context manager, and safe to use from several threads.
    """

    def __init__(self, encoder: Encoder, open_texts: Callable[[], "TextEncoder"]) -> None:
        """open_texts: opens the model's text tower, or raises NoTextTower."""
        self.encoder = encoder
        self._open_texts = open_texts
        self._texts: TextEncoder | None = None
        self._lock = threading.Lock()

    @property
    def text_encoder(self) -> "TextEncoder":
        """Returns the text tower, opened at the first use; raises NoTextTower without one."""
        with self._lock:
            if self._texts is None:
                self._texts = self._open_texts()
            return self._texts

    @property
    def name(self) -> str:
        return self.encoder.name

    @property
    def fingerprint(self) -> Fingerprint:
        """Returns the identity of weights and preprocessing, as hex SHA-256."""
        return self.encoder.fingerprint

    @property
    def dimension(self) -> int:
        return self.encoder.dimension

    def embed(self, images: Iterable[ImageInput]) -> Embeddings:
        """Returns float32 [N, D], a row of unit length for each image, in their order.

        images: paths, bytes of files, uint8 pixels [H, W, 3] or Pillow images; pixels are RGB.
        Raises ImageRejected for the first image that cannot be used, with its place in the series,
        and InvalidInput for a single image.
        """
        check_images(images)
        blocks = [np.empty((0, self.dimension), np.float32)]
        for start, batch in _batches(images):
            pixels = [self._prepare(image, start + number) for number, image in enumerate(batch)]
            rows = self.encoder.encode(np.stack(pixels))
            if len(without := np.flatnonzero(~rows.any(axis=1))):
                raise ImageRejected(
                    "no-embedding",
                    f"image {start + int(without[0])} cannot be embedded: its row is zero",
                )
            blocks.append(rows)
        return np.concatenate(blocks)

    def embed_texts(self, texts: Iterable[str]) -> Embeddings:
        """Returns float32 [N, D], a row of unit length for each text, in their order.

        Raises NoTextTower where the model embeds images only, TextRejected for the first text that
        cannot be used, with its place in the series, and InvalidInput for a single text.
        """
        if isinstance(texts, str):
            raise InvalidInput(
                "texts must be a series of strings, got one string", remedy="give a list"
            )
        encoder = self.text_encoder
        checked = [_usable(text, number) for number, text in enumerate(texts)]
        rows = encoder.encode(encoder.tokenizer(checked))
        if len(without := np.flatnonzero(~rows.any(axis=1))):
            raise TextRejected(
                "no-embedding", f"text {int(without[0])} cannot be embedded: its row is zero"
            )
        return rows

    def _prepare(self, image: ImageInput, number: int) -> NDArray[np.uint8]:
        data = image_bytes(image, max_bytes=DEFAULT_LIMITS.max_bytes)
        try:
            if isinstance(data, ImageRejected):
                raise data
            return self.encoder.preprocess.prepare(data)
        except ImageRejected as rejection:
            message = f"image {number}: {rejection.message}"
            raise ImageRejected(rejection.reason, message, remedy=rejection.remedy) from rejection

    def __repr__(self) -> str:
        return f"<model {self.name} of dimension {self.dimension}>"

    def close(self) -> None:
        """Frees the engine; a second call does nothing."""
        self.encoder.close()
        with self._lock:
            if self._texts is not None:
                self._texts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddedImages(ShortRepr):
    """The embeddings of a place of images.

    keys: of each row, the image's name in its place. class_names: its sub-folder or class, None
    where there is none. vectors: float32 [N, D], unit rows. skipped: a record with key, reason and
    detail for each image without a row.
    """

    keys: list[SampleKey]
    class_names: list[str | None]
    vectors: Embeddings
    skipped: list[dict[str, str]]
    fingerprint: Fingerprint


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddedTexts(ShortRepr):
    """The embeddings of a file of texts.

    keys: of each row, the text's id or the number of its line. vectors: float32 [N, D], unit rows.
    skipped: a record with key, reason and detail for each text without a row.
    """

    keys: list[SampleKey]
    vectors: Embeddings
    skipped: list[dict[str, str]]
    fingerprint: Fingerprint


@dataclass(frozen=True, eq=False, repr=False)
class Labels(ShortRepr):
    """The nearest centers of each row, best first.

    ids: int32 [N, L], -1 where a row has fewer. similarities: float32 [N, L], cosines, -inf there;
    those read from an artifact were rounded to half precision. keys: of the rows, None for labels
    of an array. names: of the centers.
    """

    ids: NDArray[np.integer]
    similarities: NDArray[np.float32]
    keys: list[SampleKey] | None = None
    names: Sequence[str | None] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Matches(ShortRepr):
    """The items most similar to each query, best first: ids and cosines, as Q lists that may differ
    in length.
    """

    ids: list[list[str]]
    similarities: list[list[float]]


class Index:
    """Items that can be searched. It is a context manager; close it where it is on disk."""

    def __init__(
        self,
        num_items: int,
        search: Callable[[NDArray[Any], int], Matches],
        close: Callable[[], None] | None = None,
    ) -> None:
        """close: frees what the search needs; None where that is memory alone."""
        self._num_items, self._search, self._close = num_items, search, close

    def __len__(self) -> int:
        return self._num_items

    def __repr__(self) -> str:
        return f"<index of {self._num_items} items>"

    def search(self, queries: ArrayLike, top: int = 10) -> Matches:
        """Returns the `top` items of highest cosine for each query: float [Q, D], of any length but
        zero.

        Raises InvalidInput for queries of another dimension or without a direction, ConfigInvalid
        for `top` below 1.
        """
        return self._search(as_array(queries), top)

    def close(self) -> None:
        """Frees what the index holds open; a second call does nothing."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def load_model(
    model: Location,
    *,
    precision: Precision = "fp32",
    engine: EngineName = "auto",
    num_threads: int = 0,
    exif: ExifPolicy | None = None,
    decode: DecodeMode | None = None,
) -> Model:
    """Opens a model: an artifact of `mlcd export`, other weights, an .onnx file with its JSON,
    "hog" or "pixels".

    num_threads: 0 takes every core that this process may use. exif, decode: replace what the
    model's preprocessing says. Raises NotFound, ConfigInvalid or ArtifactInvalid, naming what is
    missing.
    """
    silence_decoders()
    spec = resolve_model(os.fspath(model))
    options = EncoderOptions(
        precision=precision, engine=engine, num_threads=num_threads, exif=exif, decode=decode
    )
    return Model(open_encoder(spec, options), partial(open_text_encoder, spec, options))


def embed(
    images: Location,
    *,
    model: Location | Model,
    out: Location | None = None,
    progress: bool = False,
) -> EmbeddedImages:
    """Embeds a place of images: a folder, glob, list, tar shards, parquet, zip, or a URL of these.

    Images that cannot be used are skipped and reported. out: writes the embeddings artifact there,
    as `mlcd embed` does; after an interruption the same call continues. `Model.embed` takes images
    that are not in one place. Raises NotFound for a place that does not exist, InvalidInput where
    no image can be used.
    """
    source = open_source(os.fspath(images))
    with _open_model(model) as opened, _output_path(out) as path:
        artifact = embedding.embed(source, opened.encoder, path, _reporter(shown=progress))
        read = EmbeddingsArtifact(artifact)
        return EmbeddedImages(
            read.keys, read.class_names, read.load(), read.skipped(), read.fingerprint
        )


def embed_texts(
    texts: Location,
    *,
    model: Location | Model,
    out: Location | None = None,
    progress: bool = False,
) -> EmbeddedTexts:
    """Embeds a file of texts: .txt with one a line, or .jsonl, .csv or .parquet with a column
    `text` and, where there are ids, `id`.

    Texts that cannot be used are skipped and reported. out: writes the embeddings artifact there,
    as `mlcd embed --texts` does; after an interruption the same call continues. `Model.embed_texts`
    takes texts that are not in a file. Raises NotFound for a file that does not exist, NoTextTower
    for a model that embeds images only, InvalidInput where no text can be used.
    """
    file = read_texts(texts)
    with _open_texts_of(model) as encoder, _output_path(out) as path:
        artifact = text_embedding.embed_texts(file, encoder, path, _reporter(shown=progress))
        read = EmbeddingsArtifact(artifact)
        return EmbeddedTexts(read.keys, read.load(), read.skipped(), read.fingerprint)


def cluster(
    embeddings: Location | ArrayLike,
    num_clusters: int,
    *,
    iterations: int | None = None,
    seed: int = 0,
    subtract_mean: bool = False,
    hold_out: float | None = None,
    names: bool = False,
    out: Location | None = None,
    progress: bool = False,
) -> Centers:
    """Clusters embeddings by spherical k-means; `Centers.vectors` are unit rows, float32 [K, D].

    embeddings: an artifact, or float [N, D], whose rows are made unit rows. hold_out: the share of
    rows left out, for artifacts, 0.2 as in `mlcd cluster`; every row of an array is clustered.
    names: names each center by the majority of its members' classes, for artifacts. out: writes the
    centers artifact there. Raises InvalidInput for rows that are not finite or zero, and for more
    clusters than distinct rows.
    """
    options = clustering.ClusterOptions(
        num_clusters=num_clusters,
        iterations=iterations,
        seed=seed,
        subtract_mean=subtract_mean,
        names=names,
        hold_out=HELD_OUT_FRACTION if hold_out is None else hold_out,
    )
    if not isinstance(embeddings, str | os.PathLike):
        if hold_out or names or out is not None:
            raise ConfigInvalid(
                "hold_out, names and out need the keys and classes of an artifact, got an array",
                remedy="leave them out, or give an artifact",
            )
        return _cluster_rows(as_array(embeddings), options)
    with _output_path(out) as path:
        artifact = EmbeddingsArtifact.open(fetch_copy(embeddings))
        return Centers.read(
            clustering.cluster(artifact, path, options, reporter=_reporter(shown=progress))
        )


def label(
    rows: Location | ArrayLike,
    centers: Location | Centers | ArrayLike,
    *,
    top: int = 8,
    threshold: float | None = None,
    mode: Literal["exact", "approximate"] = "exact",
    model: Location | None = None,
    out: Location | None = None,
    progress: bool = False,
) -> Labels:
    """Gives each row its `top` nearest centers, of those at least as similar as `threshold`.

    rows: float [N, D], an embeddings artifact, or a place of images, which needs the `model` whose
    embeddings were clustered. centers: float [K, D], `Centers` or their artifact; of an artifact of
    rows, an artifact as well. mode: exact, or approximate, for artifacts. out: writes the labels
    artifact there. Raises ConfigInvalid where rows and centers are of different models,
    InvalidInput for rows that are not finite.
    """
    if not isinstance(rows, str | os.PathLike):
        if mode != "exact" or model is not None or out is not None:
            raise ConfigInvalid(
                "mode, model and out need rows in an artifact, got an array",
                remedy="leave them out",
            )
        return _label_rows(as_array(rows), centers, top, threshold)
    if not isinstance(centers, str | os.PathLike):
        raise ConfigInvalid(
            "rows in an artifact need centers in an artifact", remedy="give the centers' path"
        )
    options = labeling.LabelOptions(
        str(fetch_copy(rows)) if model is None else os.fspath(rows),
        str(fetch_copy(centers)),
        top=top,
        threshold=threshold,
        mode=mode,
        model=None if model is None else resolve_model(os.fspath(model)),
    )
    with _output_path(out) as path:
        table = LabelTable(labeling.label(options, path, reporter=_reporter(shown=progress)))
        return Labels(table.ids, table.scores, table.keys, table.names)


def index(
    embeddings: Location | ArrayLike,
    *,
    ids: Sequence[str] | None = None,
    out: Location | None = None,
    recall: float | None = None,
    progress: bool = False,
) -> Index:
    """Makes embeddings searchable.

    embeddings: an artifact, whose keys are the ids, or float [N, D] with `ids` (the row numbers
    without them). Without `out` the index is in memory and exact. out: writes a durable collection
    there, as `mlcd index` does, which the service opens, too. recall: what the collection's index
    has to show, 0.99 without it. Raises Conflict where another collection is at `out`, InvalidInput
    where ids do not fit the rows.
    """
    if not isinstance(embeddings, str | os.PathLike):
        if out is not None or recall is not None:
            raise ConfigInvalid(
                "out and recall need an artifact, got an array", remedy="leave them out"
            )
        return _index_rows(unit_rows(as_array(embeddings)), ids)
    if ids is not None:
        raise ConfigInvalid("the ids of an artifact are its keys", remedy="leave out ids")
    artifact = EmbeddingsArtifact.open(fetch_copy(embeddings))
    if out is None:
        if recall is not None:
            raise ConfigInvalid(
                "recall requires `out`: an index in memory is always exact",
                remedy="leave out recall",
            )
        return _index_rows(artifact.load(), artifact.keys)
    indexing.index(artifact, local_path(out), _reporter(shown=progress), recall=recall)
    return _on_disk(Collection.open(local_path(out), read_only=True))


def _cluster_rows(rows: NDArray[Any], options: clustering.ClusterOptions) -> Centers:
    unit = unit_rows(rows)
    mean = unit.mean(axis=0, dtype=np.float64).astype(np.float32) if options.subtract_mean else None
    aligned = unit if mean is None else unit_rows(unit - mean)
    clustering_result = kmeans(
        [aligned], options.num_clusters, iterations=options.passes, seed=options.seed
    )
    return Centers(clustering_result.centers, clustering_result.sizes, fingerprint="", mean=mean)


def _label_rows(
    rows: NDArray[Any],
    centers: Location | Centers | ArrayLike,
    top: int,
    threshold: float | None,
) -> Labels:
    least = None if threshold is None else least_product(threshold)
    if not isinstance(centers, str | os.PathLike | Centers):
        unit = unit_rows(as_array(centers))
        neighbors, names = nearest_centers(unit_rows(rows), unit, top, least), None
    else:
        opened = centers if isinstance(centers, Centers) else Centers.open(fetch_copy(centers))
        neighbors, names = (
            nearest_centers(opened.align(unit_rows(rows)), opened.vectors, top, least),
            opened.names,
        )
    return Labels(neighbors.ids, cosines(neighbors.scores), None, names)


def _index_rows(vectors: Embeddings, ids: Sequence[str] | None) -> Index:
    row_ids = [str(row) for row in range(len(vectors))] if ids is None else list(ids)
    if len(row_ids) != len(vectors):
        raise InvalidInput(
            f"{len(vectors)} rows and {len(row_ids)} ids", remedy="give one id for each row"
        )
    dimension = vectors.shape[1]

    def search(queries: NDArray[Any], top: int) -> Matches:
        if queries.ndim != 2 or queries.shape[1] != dimension:
            raise InvalidInput(
                f"queries must have shape [Q, {dimension}], got {list(queries.shape)}"
            )
        if top < 1:
            raise ConfigInvalid(f"top must be at least 1, got {top}")
        neighbors = scan(unit_rows(queries), vectors, min(top, len(row_ids)))
        return Matches(
            [[row_ids[row] for row in rows] for rows in neighbors.ids.tolist()],
            cosines(neighbors.scores).tolist(),
        )

    return Index(len(row_ids), search)


def _on_disk(collection: Collection) -> Index:
    def search(queries: NDArray[Any], top: int) -> Matches:
        lists = collection.search(queries, top).matches
        return Matches(
            [[match.id for match in matches] for matches in lists],
            [[match.similarity for match in matches] for matches in lists],
        )

    return Index(len(collection), search, collection.close)


@contextmanager
def _open_model(model: Location | Model) -> Iterator[Model]:
    """Yields an open model; one that the caller opened stays open."""
    if isinstance(model, Model):
        yield model
        return
    with load_model(model) as opened:
        yield opened


@contextmanager
def _open_texts_of(model: Location | Model) -> Iterator["TextEncoder"]:
    """Yields the text tower of a model; that of a model which the caller opened stays open."""
    if isinstance(model, Model):
        yield model.text_encoder
        return
    with closing(open_text_encoder(resolve_model(os.fspath(model)))) as opened:
        yield opened


@contextmanager
def _output_path(out: Location | None) -> Iterator[Path]:
    """Yields `out`, or a temporary path that is removed afterward."""
    if out is not None:
        yield artifact_path(out)
        return
    with TemporaryDirectory(prefix="mlcd-") as folder:
        yield Path(folder) / "artifact"


def _usable(text: object, number: int) -> str:
    checked = check_text(text, max_chars=MAX_CHARS)
    if isinstance(checked, TextRejected):
        message = f"text {number}: {checked.message}"
        raise TextRejected(checked.reason, message, remedy=checked.remedy)
    return checked


def _batches(images: Iterable[ImageInput]) -> Iterator[tuple[int, list[ImageInput]]]:
    batch: list[ImageInput] = []
    start = 0
    for image in images:
        batch.append(image)
        if len(batch) == _BATCH:
            yield start, batch
            start, batch = start + _BATCH, []
    if batch:
        yield start, batch


def _reporter(*, shown: bool) -> Reporter:
    return Reporter("auto" if shown else "silent")
