"""`mlcd plan`: the cost of work that one machine is too small for."""

import math
from contextlib import closing
from typing import Any, Final

import click

from mlcd.commands.common_options import reporter_option
from mlcd.progress import Reporter

_KIB: Final = 2**10
_BYTES_OF_A_GBIT: Final = 1e9 / 8
_NUMBER: Final = click.IntRange(1, 10**15)
_DIMENSION: Final = click.IntRange(1, 2**16)  # a tile of rows and centers of it fits into memory
_INDEXES: Final = ("flat", "hnsw", "ivf-sq8", "ivf-pq")


class _Amount(click.FloatRange):
    """A number above zero; click's own range lets `nan` through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


_POSITIVE: Final = _Amount(0, 1e15, min_open=True)


@click.command()
@click.option("--images", type=_NUMBER, required=True)
@click.option("--clusters", type=_NUMBER, required=True)
@click.option("--dimension", type=_DIMENSION, help="Of the embeddings.  [default: the model's]")
@click.option("--machines", type=_NUMBER, default=1, show_default=True)
@click.option("--labels", type=_NUMBER, default=8, show_default=True, help="Of an image.")
@click.option(
    "--updates",
    type=_NUMBER,
    default=3,
    show_default=True,
    help="Of the centers; one more pass assigns.",
)
@click.option(
    "--epochs",
    type=_Amount(0, 1e6),
    default=0,
    show_default=True,
    help="Of a training with the labels; 0 plans none.",
)
@click.option(
    "--index",
    type=click.Choice(_INDEXES),
    default="ivf-sq8",
    show_default=True,
    help="Of the collection.",
)
@click.option("--model", help="With --sample: measure a machine like this one with these weights.")
@click.option("--sample", metavar="IMAGES", help="Images like those to come, some hundreds.")
@click.option("--images-per-s", type=_POSITIVE, help="In place of --model: of one machine.")
@click.option(
    "--train-images-per-s",
    type=_POSITIVE,
    help="Of one machine that trains.  [default: a third of the rate that embeds]",
)
@click.option(
    "--image-kib", type=_POSITIVE, help="Of one image.  [default: the sample's, else 100]"
)
@click.option(
    "--tflops",
    type=_POSITIVE,
    help="Of one machine in products with the centers.  [default: measured here]",
)
@click.option("--network-gbit", type=_POSITIVE, default=10, show_default=True)
@click.option("--hour-price", type=_POSITIVE, help="Of a machine, in any money.")
@click.option("--month-price", type=_POSITIVE, help="Of a GiB stored for a month.")
@reporter_option
def plan(model: str | None, sample: str | None, reporter: Reporter, **given: Any) -> None:
    """Tell the hours, memory, storage, network and money of the way from images to a collection.

    Rates of a machine are measured here, or given. The formulas stand below the table.
    """
    if (model is None) == (given["images_per_s"] is None) or (model is None) != (sample is None):
        raise click.UsageError("give --model with --sample, or --images-per-s")
    _refuse_impossible(given["images"], given["clusters"], given["labels"])
    from mlcd.clustering.kmeans_plan import measured_rate
    from mlcd.scale.machine_rates import Rates
    from mlcd.scale.scale_plan import ScalePlan
    from mlcd.scale.stages import PlannedWork, stages

    sources = {"images a second": "given", "products": "given"}
    if model is not None and sample is not None:
        given["images_per_s"], size, dimension = _measured(model, sample)
        given["image_kib"] = given["image_kib"] or size / _KIB
        given["dimension"] = given["dimension"] or dimension
        sources["images a second"] = f"measured here with {model}, decoding included"
    if given["dimension"] is None:
        raise click.UsageError("give --dimension, or --model with --sample")
    if given["tflops"] is None:
        sources["products"] = "measured here"
        given["tflops"] = measured_rate(given["clusters"], given["dimension"]) / 1e12
    work = PlannedWork(
        **{name: given[name] for name in PlannedWork.__dataclass_fields__ if name in given},
    )
    rates = Rates(
        images_per_s=given["images_per_s"],
        train_images_per_s=given["train_images_per_s"],
        image_bytes=(given["image_kib"] or 100) * _KIB,
        products_per_s=given["tflops"] * 1e12,
        network_bytes_per_s=given["network_gbit"] * _BYTES_OF_A_GBIT,
        hour_price=given["hour_price"],
        month_price=given["month_price"],
    )
    planned = ScalePlan(work, rates, tuple(stages(work, rates)), sources)
    reporter.result(planned.facts(), str(planned))


def _refuse_impossible(images: int, clusters: int, labels: int) -> None:
    if clusters > images:
        raise click.UsageError(f"{images} images cannot make {clusters} clusters: lower --clusters")
    if labels > clusters:
        raise click.UsageError(
            f"{clusters} clusters cannot give an image {labels} labels: lower --labels"
        )


def _measured(model: str, sample: str) -> tuple[float, float, int]:
    """Returns the images a second, the bytes of one, and the dimension of its embedding."""
    from mlcd.encoders import open_encoder
    from mlcd.images.sources import open_source
    from mlcd.pipelines.resolve import resolve_model
    from mlcd.scale.machine_rates import measured_images

    def announce(line: str) -> None:
        click.echo(line, err=True)

    with closing(open_encoder(resolve_model(model, announce))) as encoder:
        rate, size = measured_images(open_source(sample), encoder)
        return rate, size, encoder.dimension
