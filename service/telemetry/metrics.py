"""Prometheus metrics of a server, for one process or summed over several.

Metrics of collections have the names as labels, or are sums if the scraper may not see the names.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import (
    CollectorRegistry,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from mlcd.errors import NotFound, StoreUnreachable
from mlcd.service.telemetry.instruments import Instruments
from mlcd.service.telemetry.text_metrics import TextMetrics
from mlcd.service.timings import METRICS_POLL_S

if TYPE_CHECKING:  # it imports faiss
    from mlcd.collections.port import CollectionPort

_FIRST_ERROR: Final = 400  # lowest HTTP status of an error

disable_created_metrics()  # would double the series, and do not work with several processes
# Clients create collections, so without a limit they could create any number of series.
_MAX_NAMED: Final = 100
_ITEM_COUNTS: Final = {
    "items": "Items that can be found.",
    "indexed": "Items in its index.",
    "unindexed": "Items outside the index, which every search scans.",
    "thumbnails": "Items that have a thumbnail.",
    "thumbnail_bytes": "Bytes of thumbnails; identical pictures count once.",
}
_RECALL: Final = "Recall@10 measured by the audit of its index; missing if searches are exact."


def use_multiprocess_dir(multiprocess_dir: Path, slot: int) -> None:
    """Stores this process's metrics in files of a directory that all server processes share.

    Call it before creating the first Metrics. slot: unique among the running processes; a process
    that replaces another takes over its slot and its counters.
    """
    # The library takes the directory only from the environment.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(multiprocess_dir)  # noqa: TID251
    values.ValueClass = values.MultiProcessValue(process_identifier=lambda: slot)


class Metrics:
    """The metrics of a server; docs/how-to/observe.md explains them.

    Names start with `mlcd_`; units are base units.
    """

    def __init__(
        self,
        *,
        model: str,
        fingerprint: str,
        engine: str,
        precision: str,
        preprocess: str,
        multiprocess_dir: Path | None = None,
    ) -> None:
        """Registers all metrics.

        multiprocess_dir: directory of `use_multiprocess_dir`; None counts only this process.
        """
        self._registry = CollectorRegistry()
        self._multiprocess_dir = multiprocess_dir
        self._instruments = instruments = Instruments(self._registry)
        self._requests = instruments.counter(
            "mlcd_requests_total", "Requests answered.", "route", "status"
        )
        self._durations = instruments.seconds(
            "mlcd_request_duration_seconds", "Time to answer.", "route"
        )
        self._answers = instruments.summary(
            "mlcd_inference_request_seconds",
            "Time to answer a request with images or texts.",
            "outcome",
        )
        self._stages = instruments.summary(
            "mlcd_inference_stage_seconds",
            "Time of a request with images or texts in one stage.",
            "stage",
        )
        self._latest = instruments.gauge(
            "mlcd_last_inference_timestamp_seconds", "When the latest inference ended.", mode="max"
        )
        self._images = instruments.counter(
            "mlcd_images_total", "Images of requests: embedded, or rejected.", "outcome"
        )
        self._body_bytes = instruments.counter(
            "mlcd_body_bytes_total",
            "Bytes of the bodies of requests with images or texts that were answered.",
        )
        self._decodes = instruments.seconds(
            "mlcd_decode_duration_seconds", "Time to decode one image, queueing included.", "format"
        )
        self._fetches = instruments.seconds(
            "mlcd_fetch_duration_seconds",
            "Time to fetch one image by its URL, waiting and redirects included.",
            "outcome",
        )
        self._waits = instruments.seconds(
            "mlcd_queue_wait_seconds", "Wait of a batch's first image for the engine."
        )
        self._depths = instruments.gauge(
            "mlcd_queue_depth", "Images or texts that wait for a thread or an engine.", "stage"
        )
        self._cache = instruments.counter(
            "mlcd_cache_requests_total", "Images and texts looked up in a cache.", "tier", "result"
        )
        self._cache_writes = instruments.counter(
            "mlcd_cache_writes_total", "Vectors to be written to Redis.", "result"
        )
        self._cache_bytes = instruments.gauge(
            "mlcd_cache_bytes", "Bytes of the vectors cached in server processes."
        )
        self._cache_up = instruments.gauge(
            "mlcd_cache_up", "Server processes that use the cache in Redis."
        )
        self._batches = instruments.batches("mlcd_batch_size", "Images per inference.")
        self._inferences = instruments.seconds(
            "mlcd_inference_duration_seconds", "Time of one inference.", "model", "backend"
        ).labels(model, engine)
        self._lookups = instruments.seconds(
            "mlcd_label_lookup_duration_seconds", "Time to find nearest centers.", "mode"
        )
        self._labeled = instruments.counter(
            "mlcd_labeled_images_total",
            "Labeled images; novel are those farther from their center than most of its members.",
            "novel",
        )
        self._labels_found = instruments.counter(
            "mlcd_labels_found_total",
            "Rows with exact labels, by where the labels were found: engine or server.",
            "by",
        )
        self._searches = instruments.seconds(
            "mlcd_index_search_duration_seconds", "Time to search a collection."
        )
        self._searched = instruments.counter(
            "mlcd_searches_total", "Searches of collections, by what compared the vectors.", "by"
        )
        self._collections: Callable[[], Mapping[str, CollectionPort]] = dict
        self._unusable: Callable[[], Mapping[str, str]] = dict
        # All processes read the same queue, so its numbers count once.
        self._jobs = instruments.gauge("mlcd_jobs", "Batch jobs.", "state", mode="livemax")
        self._job_depth = instruments.gauge(
            "mlcd_job_depth", "Tasks of jobs that wait for a worker.", mode="livemax"
        )
        self._job_wait = instruments.gauge(
            "mlcd_job_oldest_wait_seconds",
            "How long the oldest queued job has waited.",
            mode="livemax",
        )
        self._job_queue_up = instruments.gauge(
            "mlcd_job_queue_up", "Server processes that reach the queue of batch jobs."
        )
        self._names_damaged = instruments.gauge(
            "mlcd_center_names_damaged",
            "Server processes that cannot read a file of the centers' names.",
        )
        self._job_workers = instruments.gauge(
            "mlcd_job_workers", "Workers that are running.", mode="livemax"
        )
        self._webhooks = instruments.counter(
            "mlcd_webhook_deliveries_total", "Attempts to send an event to a webhook.", "result"
        )
        self._rejections = instruments.counter(
            "mlcd_rejected_total", "Images, texts or requests refused.", "reason"
        )
        self._drops = instruments.counter(
            "mlcd_dropped_total", "Admitted images and texts not encoded.", "reason"
        )
        self._held = instruments.gauge(
            "mlcd_held",
            "Held by the server: connections; images, texts, pixels and bytes of requests.",
            "of",
        )
        self._engines_up = instruments.gauge(
            "mlcd_engine_up", "Engines that can take batches, one per server process."
        )
        self._restarts = instruments.counter(
            "mlcd_engine_restarts_total", "Times the engine's process was replaced."
        )
        self._threads = instruments.gauge(
            "mlcd_threads", "Threads that may compute at one time.", "of"
        )
        self._lags = instruments.seconds(
            "mlcd_event_loop_lag_seconds", "How late the event loop wakes a timer."
        )
        self._processes = instruments.gauge("mlcd_processes", "Server processes that are up.")
        self._processes.set(1)
        labels = ("model", "fingerprint", "preprocess", "engine", "precision")
        self._info = instruments.gauge(
            "mlcd_model_info", "The served model.", *labels, mode="livemax"
        )
        self._info.labels(model, fingerprint, preprocess, engine, precision).set(1)

    def serve(
        self, *, model: str, fingerprint: str, engine: str, precision: str, preprocess: str
    ) -> None:
        """Labels the metrics with another version of the model; for a server with one process."""
        self._info.clear()
        self._info.labels(model, fingerprint, preprocess, engine, precision).set(1)

    @cached_property
    def of_texts(self) -> TextMetrics:
        """The metrics of the text tower, registered at the first use."""
        return TextMetrics(self._instruments, self._depths, self)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._durations.labels(route).observe(seconds)

    def inference_request(
        self, status: int, seconds: float, stages: Mapping[str, tuple[float, float]]
    ) -> None:
        """Counts a request with images or texts.

        stages: start and end of each stage, in seconds.
        """
        self._answers.labels("success" if status < _FIRST_ERROR else "fail").observe(seconds)
        for stage, (started, ended) in stages.items():
            self._stages.labels(stage).observe(ended - started)

    def images(self, *, embedded: int, rejected: int) -> None:
        self._images.labels("embedded").inc(embedded)
        self._images.labels("rejected").inc(rejected)

    def count_body_bytes(self, num: int) -> None:
        self._body_bytes.inc(num)

    def observe_decoding(self, image_format: str, seconds: float) -> None:
        self._decodes.labels(image_format).observe(seconds)

    def fetch(self, outcome: str, seconds: float) -> None:
        self._fetches.labels(outcome).observe(seconds)

    def batch(self, size: int, inference_s: float, wait_s: float) -> None:
        self._batches.observe(size)
        self._waits.observe(wait_s)
        self.observe_inference(inference_s)

    def observe_inference(self, seconds: float) -> None:
        """Counts one inference; called by `batch`, and by engines that form their own batches."""
        self._inferences.observe(seconds)
        self._latest.set_to_current_time()

    def cache_looked_up(self, tier: str, result: str, num: int) -> None:
        """Counts look-ups of images and texts in a cache.

        tier: memory, redis, in_flight. result: hit, miss, damaged (an invalid value in Redis),
        error.
        """
        self._cache.labels(tier, result).inc(num)

    def cache_written(self, result: str, num: int) -> None:
        """Counts vectors to be written to Redis.

        result: written, error, dropped (too many are queued, or Redis does not answer), full (the
        operator's limit is reached).
        """
        self._cache_writes.labels(result).inc(num)

    def cache_holds(self, num_bytes: int) -> None:
        self._cache_bytes.set(num_bytes)

    def cache_up(self, up: bool) -> None:  # noqa: FBT001 - a callback of `RedisCircuit`
        self._cache_up.set(up)

    @contextmanager
    def looking_up(self, mode: str) -> Iterator[None]:
        """Measures a label look-up, including the wait for a free thread."""
        with self._lookups.labels(mode).time():
            yield

    def count_labeled(self, *, images: int, novel: int) -> None:
        """Counts labeled images. novel: images beyond the distance quantile of their center."""
        self._labeled.labels("no").inc(images - novel)
        self._labeled.labels("yes").inc(novel)

    def labels_found(self, *, engine: int, server: int) -> None:
        """Counts rows with exact labels. engine: labels computed by the engine along with the
        embedding. server: labels found by a scan in this process.
        """
        self._labels_found.labels("engine").inc(engine)
        self._labels_found.labels("server").inc(server)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Measures a search, including the wait for a free thread."""
        with self._searches.time():
            yield

    def count_search(self, by: str) -> None:
        """Counts a search. by: see `SearchAnswer`."""
        self._searched.labels(by).inc()

    def collections(
        self,
        opened: Callable[[], Mapping[str, "CollectionPort"]],
        unusable: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Sets the source of collections. Both are called by each scrape."""
        self._collections, self._unusable = opened, unusable

    def jobs(
        self, jobs: Mapping[str, int], *, depth: int, oldest_wait_s: float, num_workers: int
    ) -> None:
        """Sets the numbers of the queue. jobs: number of jobs in each state."""
        for state, num in jobs.items():
            self._jobs.labels(state).set(num)
        self._job_depth.set(depth)
        self._job_wait.set(oldest_wait_s)
        self._job_workers.set(num_workers)

    def names_damaged(self, is_damaged: Callable[[], bool]) -> None:
        """Sets the callback for the centers' names. is_damaged: called like `up` of `engine_up`."""
        self._instruments.set_callback(self._names_damaged, is_damaged)

    def job_queue_up(self, *, up: bool) -> None:
        self._job_queue_up.set(up)

    def count_webhook(self, result: str) -> None:
        """Counts an attempt. result: delivered, waiting (for the next attempt), given_up."""
        self._webhooks.labels(result).inc()

    def count_rejected(self, reason: str) -> None:
        self._rejections.labels(reason).inc()

    def count_dropped(self, reason: str) -> None:
        self._drops.labels(reason).inc()

    def track_held(self, what: str, amount: Callable[[], int]) -> None:
        """Sets the callback for an amount that the server holds. See `engine_up`."""
        self._instruments.set_callback(self._held.labels(what), amount)

    def threads(self, what: str, num: int) -> None:
        self._threads.labels(what).set(num)

    def engine_up(self, up: Callable[[], bool]) -> None:
        """Sets the callback for the engine's state; replaces an earlier one.

        up: called when this process answers a scrape, and ten times a second for scrapes that other
        processes answer.
        """
        self._instruments.set_callback(self._engines_up, up)

    def queue_depth(self, stage: str, depth: Callable[[], int]) -> None:
        """Sets the callback for the depth of a queue. depth: called like `up` of `engine_up`."""
        self._instruments.set_callback(self._depths.labels(stage), depth)

    def engine_restarted(self) -> None:
        self._restarts.inc()

    async def watch(self) -> None:
        """Measures the event loop's lag, and calls the callbacks of gauges, until canceled."""
        while True:
            due = time.perf_counter() + METRICS_POLL_S
            await asyncio.sleep(METRICS_POLL_S)
            self._lags.observe(max(0.0, time.perf_counter() - due))
            self._instruments.update_gauges()

    def exposition(self) -> bytes:
        """Returns the metrics of all server processes, without metrics of collections."""
        self._instruments.update_gauges()
        if self._multiprocess_dir is None:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._multiprocess_dir))
        return generate_latest(registry)

    def of_collections(self, is_visible: Callable[[str], bool] | None = None) -> bytes:
        """Returns the metrics of the collections, read from their store.

        is_visible: returns whether to include a collection, by name; None writes sums without
        names.
        """
        opened, unusable = self._collections(), self._unusable()
        if is_visible is not None:
            opened = {name: collection for name, collection in opened.items() if is_visible(name)}
            unusable = {name: reason for name, reason in unusable.items() if is_visible(name)}
        return generate_latest(
            CollectionMetrics(opened, num_unusable=len(unusable), with_names=is_visible is not None)
        )


class CollectionMetrics(Collector):
    """The gauges of collections, read at the time of a scrape."""

    def __init__(
        self, opened: Mapping[str, "CollectionPort"], *, num_unusable: int, with_names: bool
    ) -> None:
        """opened: the open collections. num_unusable: number of collections that cannot be opened.

        names: write the first hundred collections by name; else write sums and the worst recall.
        """
        self._opened, self._num_unusable, self._with_names = opened, num_unusable, with_names

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "mlcd_collections", "Collections that are open.", value=len(self._opened)
        )
        yield GaugeMetricFamily(
            "mlcd_collections_unusable",
            "Collections that exist but cannot be opened.",
            value=self._num_unusable,
        )
        figures = dict(self._read())
        if self._with_names:
            yield from _write_by_name(dict(islice(figures.items(), _MAX_NAMED)))
        else:
            yield from _write_sums([*figures.values()])

    def _read(self) -> Iterator[tuple[str, dict[str, float | None]]]:
        """Yields the values of each collection, except deleted and unreachable ones."""
        for name, collection in self._opened.items():
            try:
                yield name, _read_figures(collection)
            except StoreUnreachable:
                return  # the other collections are in the same store
            except NotFound:
                continue


def _read_figures(collection: "CollectionPort") -> dict[str, float | None]:
    """Returns the values of `_ITEM_COUNTS` and the recall; None for an unknown value."""
    description, thumbnails = collection.describe(), collection.describe_thumbnails()
    default = 0 if collection.promises.store == "folder" else None  # databases do not count them
    return {
        "items": description.items,
        "indexed": description.indexed,
        "unindexed": description.unindexed,
        "thumbnails": thumbnails.items if thumbnails else default,
        "thumbnail_bytes": thumbnails.bytes if thumbnails else default,
        "recall": description.recall["measured"] if description.recall else None,
    }


def _write_by_name(
    figures: Mapping[str, Mapping[str, float | None]],
) -> Iterator[GaugeMetricFamily]:
    for figure, meaning in {**_ITEM_COUNTS, "recall": _RECALL}.items():
        family = GaugeMetricFamily(f"mlcd_collection_{figure}", meaning, labels=["collection"])
        for name, facts in figures.items():
            if (value := facts[figure]) is not None:
                family.add_metric([name], value)
        yield family


def _write_sums(figures: Sequence[Mapping[str, float | None]]) -> Iterator[GaugeMetricFamily]:
    for figure, meaning in _ITEM_COUNTS.items():
        total = sum(facts[figure] or 0 for facts in figures)
        yield GaugeMetricFamily(f"mlcd_collection_{figure}", meaning, value=total)
    recalls = [recall for facts in figures if (recall := facts["recall"]) is not None]
    if recalls:
        yield GaugeMetricFamily("mlcd_collection_recall", _RECALL, value=min(recalls))
