"""The Python API: each function does the same as the command of its name.

With `out`, a function writes an artifact; without it, the result stays in memory. Inputs may be
NumPy arrays, torch tensors or lists; results are NumPy arrays. Shapes: N rows, K centers, Q
queries, D dimensions, L labels per row.
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
    min_dot_product,
    unit_rows,
)

if TYPE_CHECKING:  # it imports the package tokenizers, which images do not need
    from mlcd.encoders.text_encoder import TextEncoder

_BATCH_IMAGES: Final = MAX_BATCH  # decoded images in memory at a time


class Model:
    """An open encoder of images and, if the model has a text tower, of texts.

    It is a context manager, and thread-safe.
    """

    def __init__(self, encoder: Encoder, open_texts: Callable[[], "TextEncoder"]) -> None:
        """open_texts: opens the text tower, or raises NoTextTower."""
        self.encoder = encoder
        self._open_texts = open_texts
        self._texts: TextEncoder | None = None
        self._lock = threading.Lock()

    @property
    def text_encoder(self) -> "TextEncoder":
        """Returns the text tower, opened at its first use. Raises NoTextTower without one."""
        with self._lock:
            if self._texts is None:
                self._texts = self._open_texts()
            return self._texts

    @property
    def name(self) -> str:
        return self.encoder.name

    @property
    def fingerprint(self) -> Fingerprint:
        """Returns the identity of weights and preprocessing, a hex SHA-256."""
        return self.encoder.fingerprint

    @property
    def dimension(self) -> int:
        return self.encoder.dimension

    def embed(self, images: Iterable[ImageInput]) -> Embeddings:
        """Returns unit rows, float32 [N, D], one per image in order.

        images: paths, bytes of files, uint8 RGB pixels [H, W, 3] or Pillow images. Raises
        ImageRejected for the first unusable image, naming its index, and InvalidInput for a single
        image instead of a series.
        """
        check_images(images)
        blocks = [np.empty((0, self.dimension), np.float32)]
        for start, batch in _batches(images):
            pixels = [self._prepare(image, start + number) for number, image in enumerate(batch)]
            rows = self.encoder.encode(np.stack(pixels))
            if len(zero_rows := np.flatnonzero(~rows.any(axis=1))):
                raise ImageRejected(
                    "no-embedding",
                    f"image {start + int(zero_rows[0])} cannot be embedded: its row is zero",
                )
            blocks.append(rows)
        return np.concatenate(blocks)

    def embed_texts(self, texts: Iterable[str]) -> Embeddings:
        """Returns unit rows, float32 [N, D], one per text in order.

        Raises NoTextTower if the model embeds images only, TextRejected for the first unusable
        text, naming its index, and InvalidInput for a single text instead of a series.
        """
        if isinstance(texts, str):
            raise InvalidInput(
                "texts must be a series of strings, got one string", remedy="give a list"
            )
        encoder = self.text_encoder
        checked = [_require_text(text, number) for number, text in enumerate(texts)]
        rows = encoder.encode(encoder.tokenizer(checked))
        if len(zero_rows := np.flatnonzero(~rows.any(axis=1))):
            raise TextRejected(
                "no-embedding", f"text {int(zero_rows[0])} cannot be embedded: its row is zero"
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
        """Closes the engine; a second call does nothing."""
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
    """The embeddings of a set of images.

    keys: name of each row's image inside the set. class_names: sub-folder or class of each image,
    or None. vectors: unit rows, float32 [N, D]. skipped: key, reason and detail of each image
    without a row.
    """

    keys: list[SampleKey]
    class_names: list[str | None]
    vectors: Embeddings
    skipped: list[dict[str, str]]
    fingerprint: Fingerprint


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddedTexts(ShortRepr):
    """The embeddings of a file of texts.

    keys: id or line number of each row's text. vectors: unit rows, float32 [N, D]. skipped: key,
    reason and detail of each text without a row.
    """

    keys: list[SampleKey]
    vectors: Embeddings
    skipped: list[dict[str, str]]
    fingerprint: Fingerprint


@dataclass(frozen=True, eq=False, repr=False)
class Labels(ShortRepr):
    """The nearest centers of each row, best first.

    ids: int32 [N, L], padded with -1. similarities: cosines, float32 [N, L], padded with -inf;
    labels in an artifact have half precision. keys: key of each row; None for labels of an array.
    names: name of each center, or None.
    """

    ids: NDArray[np.integer]
    similarities: NDArray[np.float32]
    keys: list[SampleKey] | None = None
    names: Sequence[str | None] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Matches(ShortRepr):
    """The items most similar to each query, best first.

    ids, similarities: Q lists of ids and of cosines; lists may differ in length.
    """

    ids: list[list[str]]
    similarities: list[list[float]]


class Index:
    """An index of items to search. It is a context manager; an index on disk must be closed."""

    def __init__(
        self,
        num_items: int,
        search: Callable[[NDArray[Any], int], Matches],
        close: Callable[[], None] | None = None,
    ) -> None:
        """close: releases the resources of `search`; None if it only uses memory."""
        self._num_items, self._search, self._close = num_items, search, close

    def __len__(self) -> int:
        return self._num_items

    def __repr__(self) -> str:
        return f"<index of {self._num_items} items>"

    def search(self, queries: ArrayLike, top: int = 10) -> Matches:
        """Returns the `top` items of highest cosine for each query.

        queries: float [Q, D], of any norm above 0. Raises InvalidInput for queries of another
        dimension, zero or not finite, ConfigInvalid for `top` below 1.
        """
        return self._search(as_array(queries), top)

    def close(self) -> None:
        """Closes the collection on disk, if any; a second call does nothing."""
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
    """Opens a model: an artifact of `mlcd export`, weights in another supported format, an .onnx
    file with its preprocessing JSON, "openai+https://HOST/v1#NAME", "hog" or "pixels".

    num_threads: number of threads; 0 uses every core available to this process. exif, decode:
    override the model's preprocessing. Raises NotFound, ConfigInvalid or ArtifactInvalid, naming
    what is missing.
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
    """Embeds the images of a folder, glob, list, tar shards, parquet, zip, or a URL of these.

    Images that cannot be used are skipped and reported in `skipped`. out: where to write the
    embeddings artifact of `mlcd embed`; an interrupted call resumes when repeated. For other
    images, use `Model.embed`. Raises NotFound if `images` does not exist, InvalidInput if no image
    can be used.
    """
    source = open_source(os.fspath(images))
    with _open_model(model) as opened, _output_path(out) as path:
        artifact = embedding.embed(source, opened.encoder, path, _reporter(shown=progress))
        rows = EmbeddingsArtifact(artifact)
        return EmbeddedImages(
            rows.keys, rows.class_names, rows.load(), rows.skipped(), rows.fingerprint
        )


def embed_texts(
    texts: Location,
    *,
    model: Location | Model,
    out: Location | None = None,
    progress: bool = False,
) -> EmbeddedTexts:
    """Embeds a file of texts: .txt with one per line, or .jsonl, .csv or .parquet with a column
    `text` and, optionally, `id`.

    Texts that cannot be used are skipped and reported in `skipped`. out: where to write the
    embeddings artifact of `mlcd embed --texts`; an interrupted call resumes when repeated. For
    texts in memory, use `Model.embed_texts`. Raises NotFound if the file does not exist,
    NoTextTower if the model embeds images only, InvalidInput if no text can be used.
    """
    file = read_texts(texts)
    with _open_texts_of(model) as encoder, _output_path(out) as path:
        artifact = text_embedding.embed_texts(file, encoder, path, _reporter(shown=progress))
        rows = EmbeddingsArtifact(artifact)
        return EmbeddedTexts(rows.keys, rows.load(), rows.skipped(), rows.fingerprint)


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

    embeddings: an artifact, or float [N, D], whose rows are normalized. hold_out: share of rows
    left out, for artifacts only, 0.2 by default; all rows of an array are clustered. names: name
    each center by the majority of its members' classes, for artifacts only. out: where to write the
    centers artifact. Raises InvalidInput for rows that are zero or not finite, and for more
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
    """Labels each row with its `top` nearest centers.

    rows: float [N, D], an embeddings artifact, or images, which need `model`. centers: float
    [K, D], `Centers`, or a centers artifact; required to be an artifact if `rows` is a location.
    threshold: minimum cosine of a label. mode: "approximate" is for artifacts only. model: model
    whose embeddings were clustered. out: where to write the labels artifact. Raises ConfigInvalid
    if rows and centers are of different models, InvalidInput for rows that are not finite.
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
            "rows in an artifact need centers in an artifact, got an array or Centers",
            remedy="give the path of the centers",
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

    embeddings: an artifact, whose keys are the ids, or float [N, D]. ids: one id per row of an
    array; row numbers by default. out: where to write a collection on disk, as `mlcd index` does,
    which the service can open too; without it, the index is in memory and exact. recall: minimum
    recall@10 of the collection's index, 0.99 by default. Raises Conflict if another collection is
    at `out`, InvalidInput if the number of ids differs from the number of rows.
    """
    if not isinstance(embeddings, str | os.PathLike):
        if out is not None or recall is not None:
            raise ConfigInvalid(
                "out and recall need an artifact, got an array", remedy="leave them out"
            )
        return _index_rows(unit_rows(as_array(embeddings)), ids)
    if ids is not None:
        raise ConfigInvalid(
            "ids need an array, got an artifact, whose keys are the ids", remedy="leave out ids"
        )
    artifact = EmbeddingsArtifact.open(fetch_copy(embeddings))
    if out is None:
        if recall is not None:
            raise ConfigInvalid(
                "recall requires `out`: an index in memory is always exact",
                remedy="leave out recall",
            )
        return _index_rows(artifact.load(), artifact.keys)
    indexing.index(artifact, local_path(out), _reporter(shown=progress), recall=recall)
    return _wrap_collection(Collection.open(local_path(out), read_only=True))


def _cluster_rows(rows: NDArray[Any], options: clustering.ClusterOptions) -> Centers:
    unit = unit_rows(rows)
    mean = unit.mean(axis=0, dtype=np.float64).astype(np.float32) if options.subtract_mean else None
    aligned = unit if mean is None else unit_rows(unit - mean)
    clustering_result = kmeans(
        [aligned], options.num_clusters, iterations=options.num_iterations, seed=options.seed
    )
    return Centers(clustering_result.centers, clustering_result.sizes, fingerprint="", mean=mean)


def _label_rows(
    rows: NDArray[Any],
    centers: Location | Centers | ArrayLike,
    top: int,
    threshold: float | None,
) -> Labels:
    min_product = None if threshold is None else min_dot_product(threshold)
    if not isinstance(centers, str | os.PathLike | Centers):
        unit = unit_rows(as_array(centers))
        neighbors, names = nearest_centers(unit_rows(rows), unit, top, min_product), None
    else:
        opened = centers if isinstance(centers, Centers) else Centers.open(fetch_copy(centers))
        neighbors, names = (
            nearest_centers(opened.align(unit_rows(rows)), opened.vectors, top, min_product),
            opened.names,
        )
    return Labels(neighbors.ids, cosines(neighbors.scores), None, names)


def _index_rows(vectors: Embeddings, ids: Sequence[str] | None) -> Index:
    row_ids = [str(row) for row in range(len(vectors))] if ids is None else list(ids)
    if len(row_ids) != len(vectors):
        raise InvalidInput(
            f"ids must have one id per row, got {len(row_ids)} ids for {len(vectors)} rows"
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


def _wrap_collection(collection: Collection) -> Index:
    def search(queries: NDArray[Any], top: int) -> Matches:
        lists = collection.search(queries, top).matches
        return Matches(
            [[match.id for match in matches] for matches in lists],
            [[match.similarity for match in matches] for matches in lists],
        )

    return Index(len(collection), search, collection.close)


@contextmanager
def _open_model(model: Location | Model) -> Iterator[Model]:
    """Yields an open model; closes it afterward unless the caller opened it."""
    if isinstance(model, Model):
        yield model
        return
    with load_model(model) as opened:
        yield opened


@contextmanager
def _open_texts_of(model: Location | Model) -> Iterator["TextEncoder"]:
    """Yields the text tower of a model; closes it afterward unless the caller opened the model."""
    if isinstance(model, Model):
        yield model.text_encoder
        return
    with closing(open_text_encoder(resolve_model(os.fspath(model)))) as opened:
        yield opened


@contextmanager
def _output_path(out: Location | None) -> Iterator[Path]:
    """Yields the path of `out`, or a temporary path that is removed afterward."""
    if out is not None:
        yield artifact_path(out)
        return
    with TemporaryDirectory(prefix="mlcd-") as folder:
        yield Path(folder) / "artifact"


def _require_text(text: object, number: int) -> str:
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
        if len(batch) == _BATCH_IMAGES:
            yield start, batch
            start, batch = start + _BATCH_IMAGES, []
    if batch:
        yield start, batch


def _reporter(*, shown: bool) -> Reporter:
    return Reporter("auto" if shown else "silent")
