"""The stages from images to a searchable collection: what each takes, with its formula."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from mlcd.artifacts.labels import DIGEST_BYTES
from mlcd.clustering.kmeans_plan import plan as plan_clustering
from mlcd.scale.machine_rates import Rates

_FLOAT: Final = 4  # bytes
_SUM: Final = 8  # bytes of an exact sum's element
_ENTRY: Final = 64 + DIGEST_BYTES  # bytes of a key of a usual length, and of the image's digest
_LABEL: Final = 4 + 2  # bytes of an id as int32 and a score as float16
_TRAINED: Final = 3  # backward takes two products for each forward one
_HEAD_PRODUCTS: Final = 4  # logits, logits again in the backward pass, and two gradients
_ITEM_BYTES: Final = 2940  # docs/explanation/collections.md: 4,988 an item with 512 floats
# A node of the graph has 2 M = 64 links in the lowest layer, and a 32nd part of that above it.
_LINK_BYTES: Final = 4 * 64 * (1 + 1 / 32)
_ID_BYTES: Final = 8
# The kinds of `mlcd index`, which need faiss to be imported; a byte of ivf-pq is four dimensions.
INDEX_BYTES: Final[Mapping[str, Callable[[int], float]]] = {
    "flat": lambda dimension: _FLOAT * dimension,
    "hnsw": lambda dimension: _FLOAT * dimension + _LINK_BYTES,
    "ivf-sq8": lambda dimension: dimension + _ID_BYTES,
    "ivf-pq": lambda dimension: dimension / 4 + _ID_BYTES,
}


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """The work to plan: numbers of images, clusters, dimensions, labels of an image and machines.

    epochs: passes of a training over the images; 0 trains nothing. sampled_classes: the share of
    the centers that a training step draws. updates: of k-means, beside the pass that assigns.
    index: that of the collection.
    """

    images: int
    clusters: int
    dimension: int
    machines: int
    labels: int = 8
    epochs: float = 0.0
    sampled_classes: float = 0.1
    updates: int = 3
    index: str = "ivf-sq8"


@dataclass(frozen=True)
class Stage:
    """The cost of one stage.

    seconds: with all machines at work. memory_bytes: of each machine, beside Python and the
    engine. storage_bytes: of what stays. network_bytes: into or between all machines together.
    formula: how the seconds came about, in numbers.
    """

    name: str
    seconds: float
    memory_bytes: float
    storage_bytes: float
    network_bytes: float
    formula: str


def stages(work: PlannedWork, rates: Rates) -> Iterator[Stage]:
    """Yields the stages in their order."""
    yield _embedding(work, rates)
    yield _clustering(work, rates)
    yield _labeling(work, rates)
    if work.epochs:
        yield _training(work, rates)
    yield _collection(work, rates)


def _embedding(work: PlannedWork, rates: Rates) -> Stage:
    read = work.images * rates.image_bytes
    encoding = (
        work.images / rates.images_per_s,
        f"{work.images} images / {rates.images_per_s:.4g} images/s",
    )
    seconds, formula = _slower(work, encoding, _reading(read, rates))
    return Stage("embed", seconds, 0.0, work.images * (_row_bytes(work) + _ENTRY), read, formula)


def _clustering(work: PlannedWork, rates: Rates) -> Stage:
    plan = plan_clustering(
        work.images,
        work.clusters,
        work.dimension,
        iterations=work.updates,
        processes=work.machines,
        flops_per_s=rates.products_per_s,
    )
    read = float(plan.rows_bytes * plan.passes)
    seconds, formula = _slower(
        work, _products(work, rates, passes=plan.passes), _reading(read, rates)
    )
    centers = work.clusters * work.dimension
    sums = 0 if work.machines == 1 else 2 * _SUM * centers * plan.passes
    if sums:
        seconds += sums / rates.network_bytes_per_s
        formula += f" + {sums:.3g} bytes of sums / {rates.network_bytes_per_s:.3g} bytes/s"
    moved = read + sums * work.machines
    memory = plan.memory_bytes - plan.library_bytes
    return Stage("cluster", seconds, memory, _FLOAT * centers, moved, formula)


def _labeling(work: PlannedWork, rates: Rates) -> Stage:
    read = float(work.images * _row_bytes(work))
    seconds, formula = _slower(work, _products(work, rates, passes=1), _reading(read, rates))
    return Stage(
        "label",
        seconds,
        2.0 * _FLOAT * work.clusters * work.dimension,  # the centers, and as the products want them
        work.images * (work.labels * _LABEL + _ENTRY),
        read,
        formula,
    )


def _row_bytes(work: PlannedWork) -> int:
    return _FLOAT * work.dimension


def _products(work: PlannedWork, rates: Rates, *, passes: int) -> tuple[float, str]:
    """Returns the seconds that the scans of all rows take one machine, and the formula."""
    scanned = f"{passes} x 2 x {work.images} x {work.clusters} x {work.dimension}"
    return (
        2.0 * passes * work.images * work.clusters * work.dimension / rates.products_per_s,
        f"{scanned} / {rates.products_per_s:.3g} FLOP/s",
    )


def _reading(num_bytes: float, rates: Rates) -> tuple[float, str]:
    """Returns the seconds that these bytes take the network of one machine, and their formula."""
    return (
        num_bytes / rates.network_bytes_per_s,
        f"{num_bytes:.3g} bytes / {rates.network_bytes_per_s:.3g} bytes/s",
    )


def _slower(work: PlannedWork, *ways: tuple[float, str]) -> tuple[float, str]:
    """Returns the slower of what goes on at one time, divided by the machines."""
    seconds, formula = max(ways)
    return seconds / work.machines, f"{formula} / {work.machines} machines"


def _training(work: PlannedWork, rates: Rates) -> Stage:
    seen = work.images * work.epochs
    drawn = work.sampled_classes * work.clusters
    head = 2.0 * _HEAD_PRODUCTS * drawn * work.dimension
    if rates.train_images_per_s is None:
        each, tower = _TRAINED / rates.images_per_s, f"{_TRAINED} / {rates.images_per_s:.4g}"
    else:
        each, tower = 1 / rates.train_images_per_s, f"1 / {rates.train_images_per_s:.4g}"
    products = f"2 x {_HEAD_PRODUCTS} x {drawn:.3g} x {work.dimension}"
    formula = (
        f"{seen:.3g} images x ({tower} images/s + {products} / {rates.products_per_s:.3g} FLOP/s)"
    )
    stepping = (seen * (each + head / rates.products_per_s), formula)
    read = seen * rates.image_bytes
    seconds, formula = _slower(work, stepping, _reading(read, rates))
    centers = _FLOAT * work.clusters * work.dimension
    return Stage("train", seconds, 3.0 * centers / work.machines, centers, read, formula)


def _collection(work: PlannedWork, rates: Rates) -> Stage:
    rows = float(work.images * _row_bytes(work))
    seconds, formula = _slower(work, _reading(rows, rates))
    return Stage(
        f"collection, {work.index}",
        seconds,
        work.images * INDEX_BYTES[work.index](work.dimension) / work.machines,
        rows + work.images * _ITEM_BYTES,
        rows,
        f"{formula}, and the making of the index, which is not planned",
    )
