"""The export of a checkpoint, or of other weights, to a version of a model in a Triton repository.

OUT/NAME/config.pbtxt lists all versions for Triton. OUT/NAME/N is an artifact, the version: its
graph, and the config.pbtxt of its export. A server may read the repository at any time: a version
appears by one rename, and config.pbtxt, replaced by another rename, mentions it only afterwards.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from mlcd.artifacts.disk import translated_os_errors, write_synced
from mlcd.artifacts.draft import Draft, find_published, lock_directory
from mlcd.artifacts.manifest import MANIFEST, Artifact, Request, open_artifact
from mlcd.cores import available_cores
from mlcd.errors import Conflict
from mlcd.export.graph import EXTERNAL
from mlcd.export.model_artifact import (
    ONNX,
    chosen_options,
    find_weights,
    load_weights,
    write_onnx,
)
from mlcd.export.parity import Parity, check_parity
from mlcd.export.triton_config import TritonOptions, Version, write_config
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import PREPROCESS, Servable
from mlcd.models.zoo import LoadOptions
from mlcd.progress import Reporter
from mlcd.types import model_name

CONFIG_FILE: Final = "config.pbtxt"
DEFAULT_NAME: Final = "mlcd-vit"
_SCRIPT: Final = "model.py"
_SCRIPT_SOURCE: Final = Path(__file__).with_name("triton_model.py")


def export_triton(
    spec: str,
    out: Path,
    *,
    name: str | None = None,
    version: int = 1,
    images: str | None = None,
    load_options: LoadOptions | None = None,
    options: TritonOptions | None = None,
    reporter: Reporter,
) -> Artifact:
    """Writes OUT/NAME/`version` and OUT/NAME/config.pbtxt; the artifact is the version.

    spec: that of `export_model`. name: None takes a model artifact's own. images: those on which
    parity is measured. Raises ArtifactInvalid, and publishes nothing, below a cosine of 0.9999, in
    half precision 0.999; Conflict where the repository holds a later version, or one of other sizes
    or another backend.
    """
    options, load_options = options or TritonOptions(), load_options or LoadOptions()
    graph = _exported(spec) if load_options == LoadOptions() else None
    name = model_name(name or (graph.config["name"] if graph else DEFAULT_NAME))
    folder = out / name
    version_folder = folder / str(version)
    weights = find_weights(spec, version_folder, load_options)
    stated = {field: value for field, value in asdict(options).items() if value is not None}
    config = {"name": name, "version": version, **stated, **chosen_options(load_options)}
    request = Request(
        "triton", config, (weights.parent,), graph.fingerprint if graph else weights.fingerprint
    )
    _refuse_foreign(out, folder)
    with _alone(folder):
        if (done := find_published(version_folder, request)) is None:
            earlier = _earlier(folder, version, options)
            model = load_weights(weights, spec)
            versions = _versions(earlier, version, model)
            with Draft(version_folder, request) as draft, reporter.stage("export", None) as meter:
                _write_graph(draft, graph, model)
                meter.advance(1)
                parity = check_parity(
                    model,
                    draft.path / ONNX,
                    images or weights.images,
                    name,
                    precision=options.precision,
                )
                meter.advance(1, cosine=parity.min_cosine)
                done = _publish(draft, model, options, versions, parity)
        _show(folder)
    return done


def versions_of(folder: Path) -> dict[int, Artifact]:
    """Returns the versions of a model in a repository, by number; none where there is no such
    folder.
    """
    found = (
        path
        for path in folder.glob("[0-9]*")
        if path.name.isdecimal() and (path / MANIFEST).is_file()
    )
    return {int(path.name): open_artifact(path, "triton", verify_files=False) for path in found}


def _exported(spec: str) -> Artifact | None:
    """Returns the model artifact at `spec`, whose graph needs no second export."""
    if (
        not (Path(spec) / MANIFEST).is_file()
        or open_artifact(Path(spec), verify_files=False).kind != "model"
    ):
        return None
    return open_artifact(Path(spec), "model")


def _refuse_foreign(out: Path, folder: Path) -> None:
    if (out / MANIFEST).is_file():
        raise Conflict(
            f"{out} is an artifact and no Triton repository", remedy="give another output directory"
        )
    if (folder / CONFIG_FILE).exists() and not versions_of(folder):
        raise Conflict(
            f"{folder} holds a model that mlcd did not export",
            remedy="give another --name or directory",
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one export to a model run at a time, because each lists in config.pbtxt what
    it found.
    """
    with translated_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock_directory(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)
        for empty in (folder, folder.parent):  # where the export failed
            with suppress(OSError):
                empty.rmdir()


def _earlier(folder: Path, version: int, options: TritonOptions) -> dict[int, Artifact]:
    """Returns the existing versions, where `version` can join them."""
    earlier = versions_of(folder)
    if earlier and max(earlier) > version:
        raise Conflict(
            f"{folder} holds version {max(earlier)}", remedy=f"give --version {max(earlier) + 1}"
        )
    for artifact in earlier.values():
        if artifact.config["backend"] != options.backend:
            raise Conflict(
                f"{artifact.path} is for the backend {artifact.config['backend']}, which is one for"
                " all versions",
                remedy="give that --backend, or another --name or directory",
            )
    return earlier


def _write_graph(draft: Draft, graph: Artifact | None, model: Servable) -> None:
    if graph is None:
        with draft.write(ONNX) as path:
            write_onnx(model, path)
        return
    for file in (ONNX, EXTERNAL):
        if file in graph.files:
            with draft.write(file) as path:
                shutil.copyfile(graph.file(file), path)


def _versions(earlier: dict[int, Artifact], number: int, model: Servable) -> dict[int, Version]:
    """Returns each version's entry in config.pbtxt; all have one size, because it is
    stated once.
    """
    versions = {number: Version(model.fingerprint(), model.preprocess)}
    sizes = (model.trunk.config.output_dim, model.preprocess.crop)
    for other, artifact in earlier.items():
        assert artifact.fingerprint is not None
        versions[other] = Version(
            artifact.fingerprint, PreprocessSpec.read(artifact.file(PREPROCESS))
        )
        found = (artifact.summary["dimension"], versions[other].preprocess.crop)
        if found != sizes:
            raise Conflict(
                f"{artifact.path} gives {found[0]} numbers of {found[1]} x {found[1]} pixels, this"
                f" model {sizes[0]} of"
                f" {sizes[1]} x {sizes[1]}: versions of one model are of one size",
                remedy="give another --name",
            )
    return versions


def _publish(
    draft: Draft,
    model: Servable,
    options: TritonOptions,
    versions: dict[int, Version],
    parity: Parity,
) -> Artifact:
    dimension = model.trunk.config.output_dim
    text = write_config(
        draft.out.parent.name,
        options,
        dimension=dimension,
        versions=versions,
        num_threads=options.num_threads or available_cores(),
    )
    for file, content in {CONFIG_FILE: text, PREPROCESS: model.preprocess.to_json()}.items():
        with draft.write(file) as path:
            path.write_text(content)
    if options.backend == "python":
        with draft.write(_SCRIPT) as path:
            shutil.copyfile(_SCRIPT_SOURCE, path)
    return draft.publish(
        fingerprint=model.fingerprint(),
        summary={
            **parity.summary(),
            "dimension": dimension,
        },
    )


def _show(folder: Path) -> None:
    """Makes the newest version's config.pbtxt the model's; a rerun completes an attempt that ended
    before this.
    """
    versions = versions_of(folder)
    newest = versions[max(versions)].file(CONFIG_FILE).read_bytes()
    shown = folder / CONFIG_FILE
    if shown.is_file() and shown.read_bytes() == newest:
        return
    with translated_os_errors(folder):
        write_synced(shown, newest)
