"""`mlcd export`: exports weights as a model to serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from mlcd.commands.common_options import ARTIFACT_OUT, WEIGHTS, announce, finish, reporter_option
from mlcd.export.triton_config import Backend, TritonOptions, TritonPrecision
from mlcd.images.decode import ExifPolicy
from mlcd.locations import local_path, show_location
from mlcd.progress import Reporter

if TYPE_CHECKING:  # these need onnx and torch
    from mlcd.export.bridge_fit import BridgeKind
    from mlcd.models.zoo import Library, LibraryPooling, LoadOptions

_STARTER_OPTIONS: Final = ("checkpoint", "out", "name", "as_json")


@click.command()
@click.argument("checkpoint", type=WEIGHTS)
@click.argument("out", type=ARTIFACT_OUT)
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
@click.option(
    "--images",
    help="Images for the parity check; with --text, images to fit the bridge on.  [default: the"
    " images of the run]",
)
@click.option(
    "--like",
    help="For weights without a configuration: the published model whose sizes, activation and"
    " preprocessing they have.",
)
@click.option(
    "--with",
    "library",
    type=click.Choice(["transformers", "timm"]),
    help="The library that reads the model, whose own class is traced.  [default: the one that"
    " config.json names, for models that mlcd does not read itself]",
)
@click.option(
    "--pooling",
    type=click.Choice(["cls", "mean", "map", "last"]),
    help="For a model that a library reads: the first token, the mean of the patches, attention"
    " pooling, or the last token.  [default: the model's own]",
)
@click.option(
    "--preprocess",
    type=click.Choice(["clip"]),
    help="CLIP's preprocessing, for files that do not state theirs.",
)
@click.option(
    "--no-projection",
    is_flag=True,
    help="Embed with the pooled class token, without the projection.",
)
@click.option(
    "--image-size",
    type=click.IntRange(1),
    help="Export at this resolution; position embeddings are resized.",
)
@click.option(
    "--exif",
    type=click.Choice(["apply", "ignore"]),
    help="Whether to apply orientation tags.  [default: apply]",
)
@click.option(
    "--text",
    "text_from",
    metavar="FROM",
    help="Give the model the text tower of FROM, another model of images and texts, through a"
    " bridge; needs --images.",
)
@click.option(
    "--bridge",
    type=click.Choice(["mixture", "ridge"]),
    help="With --text: map a text to a soft mixture of the images that it resembles, or linearly."
    "  [default: mixture]",
)
@click.option("--no-text", is_flag=True, help="Leave out the text tower of a two-tower model.")
@click.option(
    "--backend",
    type=click.Choice(["cuda", "tensorrt", "cpu", "openvino", "python"]),
    help="For triton: execution provider of ONNX Runtime, or OpenVINO in the python backend."
    "  [default: cuda]",
)
@click.option(
    "--version",
    type=click.IntRange(1),
    help="For triton: version number in the repository.  [default: 1]",
)
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "bf16"]), help="For triton.  [default: fp32]"
)
@click.option(
    "--max-batch", type=click.IntRange(1, 1024), help="For triton: largest batch.  [default: 64]"
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="For triton on a CPU: number of threads.  [default: this machine's cores]",
)
@click.option(
    "--centers",
    type=click.Path(path_type=Path),
    help="For triton: also label images with these centers.",
)
@reporter_option
def export(
    checkpoint: str,
    out: Path,
    layout: str,
    name: str | None,
    images: str | None,
    like: str | None,
    library: "Library | None",
    pooling: "LibraryPooling | None",
    preprocess: str | None,
    no_projection: bool,
    image_size: int | None,
    exif: ExifPolicy | None,
    text_from: str | None,
    bridge: "BridgeKind | None",
    no_text: bool,
    backend: Backend | None,
    version: int | None,
    precision: TritonPrecision | None,
    max_batch: int | None,
    threads: int | None,
    centers: Path | None,
    reporter: Reporter,
) -> None:
    """Export CHECKPOINT to OUT.

    CHECKPOINT: a run or one of its checkpoints, a model artifact, a directory of Hugging Face, timm
    or open_clip, a file of weights, hub:ORGANIZATION/MODEL, or starter. Nothing is written unless
    the export agrees with the model on real images.
    """
    from mlcd.export.starter.artifact import STARTER

    _check_place(out, layout)
    if checkpoint == STARTER:
        _check_starter_options()
        _export_starter(out, name or STARTER, reporter)
        return
    if text_from is not None:
        if layout != "onnx" or any(
            (like, library, pooling, preprocess, no_projection, image_size, exif, no_text)
        ):
            raise click.UsageError("--text can only be combined with --bridge, --images and --name")
        _export_bridged(checkpoint, out, text_from, bridge or "mixture", images, name, reporter)
        return
    if bridge is not None:
        raise click.UsageError("--bridge requires --text")
    from mlcd.export.model_artifact import export_hf, export_model
    from mlcd.models.zoo import LoadOptions

    options = LoadOptions(
        like=like,
        clip_preprocessing=preprocess == "clip",
        projection=not no_projection,
        image_size=image_size,
        exif=exif,
        library=library,
        pooling=pooling,
    )
    _announce_missing_texts(checkpoint, options, text=not no_text)
    _announce_missing_int8(checkpoint)
    if layout == "triton":
        _export_triton(
            checkpoint,
            out,
            name=name,
            version=version or 1,
            images=images,
            load_options=options,
            text=not no_text,
            options=TritonOptions(backend or "cuda", precision or "fp32", max_batch or 64, threads),
            centers=centers,
            reporter=reporter,
        )
        return
    if backend or version or precision or max_batch or threads or centers:
        raise click.UsageError(
            "--backend, --version, --precision, --max-batch, --threads and --centers require"
            " --format triton"
        )
    if layout == "hf":
        if images:
            raise click.UsageError(
                "--images cannot be combined with --format hf, which is compared tensor by tensor"
            )
        artifact = export_hf(
            checkpoint,
            out,
            name=name or "mlcd-vit",
            options=options,
            text=not no_text,
            reporter=reporter,
        )
        finish(reporter, artifact, "model for transformers")
        return
    artifact = export_model(
        checkpoint,
        out,
        name=name or "mlcd-vit",
        images=images,
        options=options,
        text=not no_text,
        reporter=reporter,
    )
    facts = artifact.summary
    line = f"model of dimension {facts['dimension']}, parity {facts['parity_min_cosine']:.6f}"
    if "text_parity_min_cosine" in facts:
        line += f", text parity {facts['text_parity_min_cosine']:.6f}"
    finish(reporter, artifact, line)


def _export_triton(
    checkpoint: str,
    out: Path,
    *,
    name: str | None,
    version: int,
    images: str | None,
    load_options: "LoadOptions",
    text: bool,
    options: TritonOptions,
    centers: Path | None,
    reporter: Reporter,
) -> None:
    from mlcd.artifacts.manifest import open_artifact
    from mlcd.export.triton import export_triton

    # reports a wrong path before the export, which takes minutes
    center_artifact = None if centers is None else open_artifact(centers, "centers")
    artifact = export_triton(
        checkpoint,
        out,
        name=name,
        version=version,
        images=images,
        load_options=load_options,
        text=text,
        options=options,
        reporter=reporter,
    )
    if center_artifact is not None:
        from mlcd.export.triton_labels import export_labels

        labeled = export_labels(artifact, center_artifact, options=options, reporter=reporter)
        num, top = labeled.summary["centers"], labeled.summary["top"]
        announce(f"labels by {num} centers, at most {top} per image: {labeled.path}")
    title = f"version {artifact.config['version']} of {artifact.config['name']} for Triton"
    if "parity_min_cosine" in artifact.summary:
        title += f", parity {artifact.summary['parity_min_cosine']:.6f}"
    finish(reporter, artifact, title)


def _check_place(out: Path, layout: str) -> None:
    """Raises ConfigInvalid for a Triton repository at a URL; it must be a local folder."""
    if layout == "triton":
        local_path(show_location(str(out)))


def _announce_missing_texts(checkpoint: str, options: "LoadOptions", *, text: bool) -> None:
    from mlcd.export.text_tower import lacks_tokenizer

    if text and lacks_tokenizer(checkpoint, options):
        announce(
            f"{checkpoint} has a text tower but no tokenizer.json, so the text tower is left out:"
            " save tokenizer.json there with transformers,"
            " AutoTokenizer.from_pretrained(NAME).save_pretrained(DIRECTORY), and export again"
        )


def _announce_missing_int8(checkpoint: str) -> None:
    from mlcd.artifacts.manifest import MANIFEST, read_manifest
    from mlcd.encoders.openvino import INT8_GRAPH

    is_artifact = (Path(checkpoint) / MANIFEST).is_file()
    if is_artifact and INT8_GRAPH in read_manifest(Path(checkpoint)).files:
        announce(
            f"the int8 graph of {checkpoint} is left out: it only runs in OpenVINO, from that"
            " directory"
        )


def _check_starter_options() -> None:
    """Raises UsageError for an option that does not apply to the starter."""
    context = click.get_current_context()
    for option in context.command.params:
        assert option.name is not None
        is_given = context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        is_allowed = option.name in _STARTER_OPTIONS or context.params.get(option.name) == "onnx"
        if is_given and not is_allowed:
            raise click.UsageError(
                f"{option.opts[0]} cannot be combined with starter: its towers are finished graphs"
            )


def _export_starter(out: Path, name: str, reporter: Reporter) -> None:
    from mlcd.export.starter.artifact import export_starter

    artifact = export_starter(out, name=name, reporter=reporter)
    finish(reporter, artifact, "the starter, a model of images and texts")


def _export_bridged(
    checkpoint: str,
    out: Path,
    text_from: str,
    kind: "BridgeKind",
    images: str | None,
    name: str | None,
    reporter: Reporter,
) -> None:
    from mlcd.pipelines.bridge import bridge_model

    if images is None:
        raise click.UsageError("--text needs --images, to fit the bridge between both models on")
    artifact = bridge_model(
        checkpoint,
        out,
        text_from=text_from,
        kind=kind,
        images=images,
        name=name,
        announce=announce,
        reporter=reporter,
    )
    finish(reporter, artifact, _bridge_line(artifact.summary))


def _bridge_line(facts: dict[str, Any]) -> str:
    held_out = f"of {facts['bridge_held_out']} held-out images"
    line = f"model with a text tower through a {facts['bridge']} bridge; {held_out}, "
    if "bridge_zero_shot" in facts:
        accuracy, classes = facts["bridge_zero_shot"], facts["bridge_classes"]
        return f"{line}{accuracy:.1%} are recognized by name among {classes} classes"
    return f"{line}{facts['bridge_recall_at_1']:.1%} are nearest to themselves"
