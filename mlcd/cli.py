"""The `mlcd` command, which parses, opens, calls one pipeline and prints."""

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import click

from mlcd.encoders.base import EngineName, Precision
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import MlcdError
from mlcd.export.triton_config import Backend, TritonOptions, TritonPrecision
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import DecodeMode
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.locations import local_path
from mlcd.progress import Reporter
from mlcd.version import __version__

FINISHED = "finished"
_FAILED = 1
_BAD_USAGE = 2
_INTERRUPTED = 130


class _Commands(click.Group):
    """The group of our commands and of those that installed products add through the entry point
    `mlcd.commands`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(point.name for point in _added())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        for point in _added():
            if point.name == cmd_name:
                try:
                    command: click.Command = point.load()
                except ImportError as error:
                    raise click.UsageError(
                        f"`mlcd {cmd_name}` needs the package {error.name}: pip install"
                        " 'mlcd[serve,train]'"
                    ) from error
                return command
        return None


class LocalPath(click.Path):
    """A path on this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            local_path(value)
        return super().convert(value, param, ctx)


LOCAL_PATH = LocalPath(path_type=Path)


def _added() -> Any:
    return entry_points(group="mlcd.commands")


def reporter_option(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--json` and passes a Reporter."""

    @click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Progress and result as JSON lines on standard output.",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool, **kwargs: Any) -> None:
        command(*args, reporter=Reporter("json" if as_json else "auto"), **kwargs)

    return wrapped


def encoder_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for opening a model, and passes them as `encoder`."""

    @click.option(
        "--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True
    )
    @click.option(
        "--engine",
        type=click.Choice(["auto", "openvino", "torch"]),
        default="auto",
        show_default=True,
    )
    @click.option(
        "--exif",
        type=click.Choice(["apply", "ignore"]),
        help="Other than the model's preprocessing says.",
    )
    @click.option(
        "--decode",
        type=click.Choice(["exact", "fast"]),
        help="fast: JPEG at a fraction of its size.",
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        precision: Precision,
        engine: EngineName,
        exif: ExifPolicy | None,
        decode: DecodeMode | None,
        **kwargs: Any,
    ) -> None:
        options = EncoderOptions(precision=precision, engine=engine, exif=exif, decode=decode)
        command(*args, encoder=options, **kwargs)

    return wrapped


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlcd")
def cli() -> None:
    """Raw images to embeddings, clusters, labels, a trained ViT and a live service."""


@cli.command()
@click.argument("images", nargs=-1, required=True, metavar="IMAGES")
@click.argument("out", type=LOCAL_PATH)
@click.option(
    "--model",
    required=True,
    help="A model artifact, other weights as `mlcd export` takes them, an .onnx file with its JSON,"
    " hog or pixels.",
)
@encoder_options
@click.option(
    "--append", is_flag=True, help="Add to the embeddings at OUT the images that they do not have."
)
@reporter_option
def embed(
    images: tuple[str, ...],
    out: Path,
    model: str,
    encoder: EncoderOptions,
    append: bool,
    reporter: Reporter,
) -> None:
    """Turn IMAGES into unit embeddings at OUT.

    IMAGES: a folder, a glob of image files ('photos/*.jpg', in quotes), a .txt file that lists
    some, a glob of tar shards, a parquet or zip file, or an fsspec URL of these. Files that cannot
    be used are skipped and listed in OUT/errors.jsonl.
    """
    if len(images) > 1:
        raise click.UsageError(
            f"{images[0]} and {images[1]} are two places for images: put a pattern into quotes, or"
            " list files in a .txt"
        )
    from mlcd.encoders import open_encoder
    from mlcd.images.quiet import silence_decoders
    from mlcd.images.sources import open_source
    from mlcd.pipelines.embed import embed as run
    from mlcd.pipelines.embed_more import embed_more
    from mlcd.pipelines.resolve import resolve_model

    silence_decoders()
    source = open_source(images[0])
    with closing(open_encoder(resolve_model(model, _announce), encoder)) as opened:
        artifact = (embed_more if append and out.exists() else run)(source, opened, out, reporter)
    facts = artifact.summary
    _finish(
        reporter,
        artifact,
        f"{facts['images']} embeddings of {facts['dimension']}, {facts['errors']} files skipped",
    )


@cli.command()
@click.argument("embeddings", type=LOCAL_PATH)
@click.argument("out", type=LOCAL_PATH)
@click.option("--clusters", type=click.IntRange(1), required=True)
@click.option(
    "--iterations", type=click.IntRange(0), help="At most.  [default: 25; 3 above 16,384 clusters]"
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option(
    "--hold-out",
    type=click.FloatRange(0, 1, max_open=True),
    default=HELD_OUT_FRACTION,
    show_default=True,
    help="Share of each class (or overall), by the hash of the key, left out, as training and"
    " evaluation leave it out.",
)
@click.option(
    "--sample", type=click.IntRange(1), help="Cluster only so many rows per cluster, drawn by hash."
)
@click.option(
    "--subtract-mean", is_flag=True, help="Compare embeddings after subtracting their mean."
)
@click.option(
    "--names", is_flag=True, help="Name each center by the majority of its members' sub-folders."
)
@click.option(
    "--report",
    is_flag=True,
    help="Also write report.json and sizes.png: how good the clusters are.",
)
@click.option(
    "--examples",
    type=click.IntRange(0, 64),
    default=8,
    show_default=True,
    help="Keep the keys of so many nearest members of each center; 0 keeps none.",
)
@click.option(
    "--plan", "only_plan", is_flag=True, help="Tell memory, arithmetic and time; write nothing."
)
@reporter_option
def cluster(
    embeddings: Path,
    out: Path,
    clusters: int,
    iterations: int | None,
    seed: int,
    hold_out: float,
    sample: int | None,
    subtract_mean: bool,
    names: bool,
    report: bool,
    examples: int,
    only_plan: bool,
    reporter: Reporter,
) -> None:
    """Cluster EMBEDDINGS by spherical k-means into centers at OUT.

    Interrupted, the same command goes on at the last finished iteration. Several processes share
    the work by `torchrun --nproc-per-node N -m mlcd cluster …`; the centers do not depend on their
    number.
    """
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.pipelines.cluster import ClusterOptions, plan
    from mlcd.pipelines.cluster import cluster as run
    from mlcd.world import Elsewhere, one_voice, open_world

    options = ClusterOptions(
        num_clusters=clusters,
        iterations=iterations,
        seed=seed,
        hold_out=hold_out,
        sample=sample,
        subtract_mean=subtract_mean,
        names=names,
        report=report,
        examples=examples,
    )
    try:
        with open_world() as world, one_voice(world):
            opened = EmbeddingsArtifact.open(embeddings)
            if world.rank:
                reporter = Reporter("silent")
            if only_plan:
                estimate = plan(opened, options, world=world)
                reporter.result(estimate.facts(), str(estimate))
                return
            artifact = run(opened, out, options, reporter=reporter, world=world)
    except Elsewhere:
        raise click.exceptions.Exit(_FAILED) from None
    facts = artifact.summary
    _finish(
        reporter,
        artifact,
        f"{facts['clusters']} centers of {facts['rows']} rows ({facts.get('held_out', 0)} held"
        " out), "
        f"objective {facts['objective']:.4f}",
    )


@cli.command()
@click.argument("centers", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help='JSON like {"3": "cat"}, or lines of id<TAB>name or id,name; null or nothing takes a name'
    " away.",
)
@reporter_option
def name(centers: Path, file: Path, reporter: Reporter) -> None:
    """Name CENTERS by hand.

    Names stand beside the centers and change nothing else: digests, labels and indexes stay valid.
    """
    from mlcd.pipelines.name import set_names

    naming = set_names(centers, file)
    facts = {FINISHED: str(centers), **asdict(naming)}
    line = (
        f"{naming.num_changed} names changed, "
        f"{naming.num_named} of {naming.num_centers} centers named: {centers}"
    )
    reporter.result(facts, line)


@cli.command()
@click.argument("source", metavar="EMBEDDINGS|IMAGES")
@click.argument("out", type=LOCAL_PATH)
@click.option("--centers", type=LocalPath(), required=True)
@click.option("--top", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--threshold", type=float, help="Keep only centers at least this similar, of the --top nearest."
)
@click.option(
    "--mode", type=click.Choice(["exact", "approximate"]), default="exact", show_default=True
)
@click.option(
    "--probes",
    type=click.IntRange(1),
    help="Of --mode approximate; default: what an audit asks for.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes that share the work.",
)
@click.option(
    "--model",
    help="For IMAGES: what embeds them, as in `mlcd embed`; it must be that of the centers.",
)
@encoder_options
@click.option(
    "--append",
    is_flag=True,
    help="Add to the labels at OUT those of rows that EMBEDDINGS have gained.",
)
@reporter_option
def label(
    source: str,
    out: Path,
    centers: str,
    top: int,
    threshold: float | None,
    mode: Literal["exact", "approximate"],
    probes: int | None,
    workers: int,
    model: str | None,
    encoder: EncoderOptions,
    append: bool,
    reporter: Reporter,
) -> None:
    """Give every row of EMBEDDINGS, or every one of IMAGES, its nearest centers at OUT.

    Exactly, unless --mode approximate: that is for many thousands of centers, and tells the recall
    of an audited sample in the manifest. Images that cannot be used are skipped and listed in
    OUT/errors.jsonl.
    """
    from mlcd.images.quiet import silence_decoders
    from mlcd.pipelines.label import LabelOptions
    from mlcd.pipelines.label import label as run
    from mlcd.pipelines.label_more import label_more
    from mlcd.pipelines.resolve import resolve_model

    silence_decoders()
    if model is None and encoder != EncoderOptions():
        raise click.UsageError(
            "--precision, --engine, --exif and --decode are for a --model, which only images need"
        )
    options = LabelOptions(
        source,
        centers,
        top=top,
        threshold=threshold,
        mode=mode,
        probes=probes,
        model=None if model is None else resolve_model(model, _announce),
        encoder=encoder,
    )
    if append and out.exists():
        artifact = label_more(options, out, reporter)
    else:
        artifact = run(options, out, workers=workers, reporter=reporter)
    facts = artifact.summary
    _finish(
        reporter, artifact, f"labels of {facts['images']} images among {facts['centers']} centers"
    )


@cli.command()
@click.argument("source", type=LOCAL_PATH)
@click.argument("out", type=LOCAL_PATH)
@click.option(
    "--recall",
    type=float,
    help="Recall@10 that the collection's index has to show.  [default: 0.99]",
)
@click.option(
    "--export",
    "export_",
    is_flag=True,
    help="SOURCE: a collection; OUT: a parquet file of all its items.",
)
@click.option(
    "--duplicates", type=float, help="OUT: JSON lines, the groups of SOURCE above this cosine."
)
@click.option(
    "--append", is_flag=True, help="Add to the collection at OUT what the embeddings have gained."
)
@reporter_option
def index(
    source: Path,
    out: Path,
    recall: float | None,
    export_: bool,
    duplicates: float | None,
    append: bool,
    reporter: Reporter,
) -> None:
    """Build the collection of SOURCE at OUT (STATE/collections/NAME for the service).

    SOURCE: embeddings or an exported parquet file; with --duplicates embeddings or a collection.
    Interrupted, the same command goes on.
    """
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.pipelines import index as pipeline

    if export_ and duplicates is not None:
        raise click.UsageError("--export and --duplicates exclude each other")
    if (recall is not None or append) and (export_ or duplicates is not None):
        raise click.UsageError("--recall and --append are for building a collection")
    if export_:
        num_items = pipeline.export_parquet(source, out, reporter)
        reporter.result({FINISHED: str(out), "items": num_items}, f"{num_items} items: {out}")
    elif duplicates is not None:
        groups, items = pipeline.duplicates(source, out, reporter, similarity=duplicates)
        facts = {FINISHED: str(out), "groups": groups, "items": items}
        reporter.result(facts, f"{groups} groups of {items} items: {out}")
    else:
        if source.suffix == ".parquet":
            described = pipeline.import_parquet(source, out, reporter, recall=recall)
        else:
            described = pipeline.index(
                EmbeddingsArtifact.open(source), out, reporter, recall=recall, append=append
            )
        line = f"collection of {described.items} items, {described.kind} index"
        reporter.result({FINISHED: str(out), **asdict(described)}, f"{line}: {out}")


@cli.command()
@click.argument("checkpoint")
@click.argument("out", type=LOCAL_PATH)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["onnx", "triton", "hf"]),
    default="onnx",
    show_default=True,
    help="onnx: the model artifact that `mlcd serve` reads. triton: a Triton model repository. hf:"
    " for transformers.",
)
@click.option("--name", help="The model's name, also in Triton.  [default: mlcd-vit]")
@click.option("--images", help="Images for the parity check; default: those of the run.")
@click.option(
    "--like",
    help="The published tower whose sizes, activation and preprocessing bare weights have.",
)
@click.option(
    "--preprocess",
    type=click.Choice(["clip"]),
    help="CLIP's preprocessing, where the files state none.",
)
@click.option("--no-projection", is_flag=True, help="Embed by the pooled class token.")
@click.option(
    "--image-size", type=click.IntRange(1), help="Another resolution; positions are resized."
)
@click.option(
    "--exif",
    type=click.Choice(["apply", "ignore"]),
    help="What orientation tags do.  [default: apply]",
)
@click.option(
    "--backend",
    type=click.Choice(["cuda", "tensorrt", "cpu", "openvino", "python"]),
    help="Of triton: ONNX Runtime on what, or OpenVINO in the python backend.  [default: cuda]",
)
@click.option(
    "--version", type=click.IntRange(1), help="Of triton: beside the earlier ones.  [default: 1]"
)
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "bf16"]), help="Of triton.  [default: fp32]"
)
@click.option("--max-batch", type=click.IntRange(1, 1024), help="Of triton.  [default: 64]")
@click.option(
    "--threads", type=click.IntRange(1), help="Of triton on a CPU.  [default: this machine's cores]"
)
@reporter_option
def export(
    checkpoint: str,
    out: Path,
    layout: str,
    name: str | None,
    images: str | None,
    like: str | None,
    preprocess: str | None,
    no_projection: bool,
    image_size: int | None,
    exif: ExifPolicy | None,
    backend: Backend | None,
    version: int | None,
    precision: TritonPrecision | None,
    max_batch: int | None,
    threads: int | None,
    reporter: Reporter,
) -> None:
    """Export CHECKPOINT to OUT.

    CHECKPOINT: a run or one of its checkpoints, a model artifact, a directory of Hugging Face or
    open_clip, a file of weights, or hub:ORGANIZATION/MODEL. Nothing is written unless it agrees
    with the model on real images.
    """
    from mlcd.export.model import export_hf, export_model
    from mlcd.models.zoo import LoadOptions

    options = LoadOptions(
        like=like,
        clip_preprocessing=preprocess == "clip",
        projection=not no_projection,
        image_size=image_size,
        exif=exif,
    )
    if layout == "triton":
        from mlcd.export.triton import export_triton

        artifact = export_triton(
            checkpoint,
            out,
            name=name,
            version=version or 1,
            images=images,
            load_options=options,
            options=TritonOptions(backend or "cuda", precision or "fp32", max_batch or 64, threads),
            reporter=reporter,
        )
        facts = artifact.summary
        named = f"version {artifact.config['version']} of {artifact.config['name']} for Triton"
        _finish(reporter, artifact, f"{named}, parity {facts['parity_min_cosine']:.6f}")
        return
    if backend or version or precision or max_batch or threads:
        raise click.UsageError(
            "--backend, --version, --precision, --max-batch and --threads are for --format triton"
        )
    if layout == "hf":
        if images:
            raise click.UsageError(
                "--images is for the parity of onnx; hf is compared tensor by tensor"
            )
        artifact = export_hf(
            checkpoint, out, name=name or "mlcd-vit", options=options, reporter=reporter
        )
        _finish(reporter, artifact, "model for transformers")
        return
    artifact = export_model(
        checkpoint, out, name=name or "mlcd-vit", images=images, options=options, reporter=reporter
    )
    facts = artifact.summary
    _finish(
        reporter,
        artifact,
        f"model of dimension {facts['dimension']}, parity {facts['parity_min_cosine']:.6f}",
    )


@cli.command()
@click.argument("directory", type=LOCAL_PATH)
@click.option("--quiet", is_flag=True, help="One line instead of one for each artifact.")
@reporter_option
def verify(directory: Path, quiet: bool, reporter: Reporter) -> None:
    """Compare every byte of DIRECTORY's artifacts, and of what they were made from, with the
    manifests.
    """
    from mlcd.pipelines.verify import verify as run

    findings = list(run(directory))
    if quiet:
        num_checked = sum(finding.checked for finding in findings)
        skipped = f", {len(findings) - num_checked} skipped" if num_checked < len(findings) else ""
        line = f"{num_checked} artifacts and image sets match{skipped}: {directory}"
        reporter.result({"checked": num_checked, "skipped": len(findings) - num_checked}, line)
        return
    for finding in findings:
        mark = "ok     " if finding.checked else "skipped"
        facts = {
            "path": finding.path,
            "kind": finding.kind,
            "checked": finding.checked,
            "detail": finding.detail,
        }
        reporter.result(facts, f"{mark} {finding.kind:<11} {finding.path}: {finding.detail}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def doctor(as_json: bool) -> None:
    """Show what this machine has, and which engine would run a model and why."""
    from mlcd.doctor import examine, report

    facts = examine()
    click.echo(json.dumps(facts, indent=2) if as_json else report(facts))


@cli.command()
@click.option(
    "--images", help="A folder of your own images; default: scikit-learn's scanned digits."
)
@click.option(
    "--features",
    help="The model whose embeddings are clustered (see `mlcd embed --model`); default: hog.",
)
@click.option(
    "--recipe", help="The training recipe; default: demo-digits, with --images demo-photos."
)
@click.option("--out", type=LOCAL_PATH, default=Path("demo"), show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--no-serve", is_flag=True, help="Stop after the result table.")
def demo(
    images: str | None,
    features: str | None,
    recipe: str | None,
    out: Path,
    seed: int,
    host: str,
    port: int,
    no_serve: bool,
) -> None:
    """Run the whole journey on real images, then serve the trained model."""
    from mlcd.demo import Demo, free_port

    # checked before the minutes of work, not after
    if not no_serve and free_port(host, port) != port:
        _announce(f"port {port} is in use: the service will take a free one, and say which")
    # between two steps; while a step runs, it gets the signal
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    journey = Demo(out=out, images=images, features=features, recipe=recipe, seed=seed)
    journey.run()
    if not no_serve:
        journey.serve(host, port)


def _announce(line: str) -> None:
    click.echo(f"mlcd: {line}", err=True)


def _finish(reporter: Reporter, artifact: Any, line: str) -> None:
    facts = {FINISHED: str(artifact.path), "digest": artifact.digest, **artifact.summary}
    reporter.result(facts, f"{line}: {artifact.path}")


def main() -> None:
    """Runs the command and exits: 0 on success, 2 with one line for a user's mistake, 130 when
    interrupted.
    """
    try:
        cli(prog_name="mlcd", standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "mlcd"
        _fail(f"{error.format_message()} (`{where} --help` explains)")
    except click.ClickException as error:
        _fail(error.format_message())
    except MlcdError as error:
        _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("mlcd: interrupted; run the same command again to go on", err=True)
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("mlcd", "training", "service"):
            raise
        _fail(f"this needs the package {error.name}: pip install 'mlcd[serve,train]'")
    except BrokenPipeError:  # `mlcd … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(message: str) -> None:
    click.echo(f"mlcd: {' '.join(message.split())}", err=True)
    sys.exit(_BAD_USAGE)
