"""Exports a checkpoint, or other weights, as a version of a model in a Triton repository.

OUT/NAME/config.pbtxt lists all versions for Triton. OUT/NAME/N is the artifact of one version: its
graph, and the config.pbtxt of its export. A server may read the repository at any time, so a
version appears by one rename, and only then another rename replaces config.pbtxt.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from mlcd.artifacts.disk import lock_directory, translate_os_errors, write_synced
from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import MANIFEST, Artifact, Request, open_artifact
from mlcd.cores import available_cores
from mlcd.errors import Conflict
from mlcd.export.libraries import choose_library, export_library_model, library_parent
from mlcd.export.model_artifact import Weights, find_weights, load_weights
from mlcd.export.text_tower import text_of_artifact, write_text
from mlcd.export.triton_config import TritonOptions, write_config
from mlcd.export.triton_towers import Tower, graph_tower, image_tower, read_facts, text_tower
from mlcd.models.servable import Servable
from mlcd.models.text_part import FOLDER, TEXT_SUFFIX, digest_of_both, text_digest
from mlcd.models.zoo import LoadOptions
from mlcd.progress import Reporter
from mlcd.types import Fingerprint, model_name

CONFIG_FILE: Final = "config.pbtxt"
DEFAULT_NAME: Final = "mlcd-vit"
SCRIPT: Final = "model.py"
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
    text: bool = True,
    reporter: Reporter,
) -> Artifact:
    """Writes OUT/NAME/`version` and OUT/NAME/config.pbtxt, and returns the version. A text tower
    becomes the model NAME-text beside it.

    spec: see `export_model`. name: None takes a model artifact's own name. images: images for the
    check of parity. text: False omits the text tower. Raises ArtifactInvalid, and publishes
    nothing, if a cosine is below 0.9999 (half precision: 0.999); Conflict if the repository has a
    later version, or a version with other sizes or another backend.
    """
    options, load_options = options or TritonOptions(), load_options or LoadOptions()
    export = _Export(out, version, options, load_options, images, reporter)
    if (library := choose_library(spec, load_options)) is None:
        graph = _open_exported(spec) if load_options == LoadOptions() else None
        name = model_name(name or (graph.config["name"] if graph else DEFAULT_NAME))
        weights = find_weights(spec, out / name / str(version), load_options, text=text)
        return export.run(spec, name, weights, graph)
    name = model_name(name or DEFAULT_NAME)
    with TemporaryDirectory() as temporary:
        graph = export_library_model(
            spec,
            Path(temporary) / "model",
            library,
            name=name,
            images=images,
            options=load_options,
            text=text,
            reporter=reporter,
        )
        parent = library_parent(spec, out / name / str(version))
        return export.run(
            spec, name, Weights(parent, None, None, text=text_of_artifact(graph)), graph
        )


@dataclass(frozen=True)
class _Export:
    """The arguments of one export."""

    out: Path
    version: int
    options: TritonOptions
    load_options: LoadOptions
    images: str | None
    reporter: Reporter

    def run(self, spec: str, name: str, weights: Weights, graph: Artifact | None) -> Artifact:
        """graph: model artifact of the same model, whose graphs are copied."""
        options, reporter = self.options, self.reporter
        config = {
            "version": self.version,
            **_as_fields(options),
            **self.load_options.non_default(),
            **({} if weights.text is None else {"text": True}),
        }
        fingerprint = _fingerprint_if_known(weights, graph)
        repository = _Repository(self.out, config, weights, fingerprint, options)
        with TemporaryDirectory() as temporary:
            model = _Model(weights, spec, graph, Path(temporary))
            if weights.text is not None:
                repository.export(
                    name + TEXT_SUFFIX,
                    lambda: text_tower(
                        model.text_part, model.fingerprint, name=name, precision=options.precision
                    ),
                    reporter,
                )
            return repository.export(
                name, lambda: self._image_tower(model, weights, graph, name), reporter
            )

    def _image_tower(
        self, model: "_Model", weights: Weights, graph: Artifact | None, name: str
    ) -> Tower:
        if graph is not None and weights.load is None:
            return graph_tower(graph, precision=self.options.precision)
        return image_tower(
            model.images,
            model.fingerprint,
            graph=graph,
            images=self.images or weights.images,
            name=name,
            precision=self.options.precision,
        )


def _as_fields(options: TritonOptions) -> dict[str, Any]:
    return {field: value for field, value in asdict(options).items() if value is not None}


def _fingerprint_if_known(weights: Weights, graph: Artifact | None) -> Fingerprint | None:
    """Returns the export's fingerprint if it is known before reading the weights."""
    if graph is None:
        return weights.fingerprint
    # the fingerprint of an artifact covers its text tower
    is_whole = weights.text is not None or text_of_artifact(graph) is None
    return graph.fingerprint if is_whole else None


class _Model:
    """The weights of an export, read at their first use.

    temporary: existing folder for a text part that is in no artifact.
    """

    def __init__(
        self, weights: Weights, spec: str, graph: Artifact | None, temporary: Path
    ) -> None:
        self._weights, self._spec, self._graph = weights, spec, graph
        self._temporary = temporary

    @cached_property
    def images(self) -> Servable:
        return load_weights(self._weights, self._spec)

    @cached_property
    def text_part(self) -> Path:
        """Returns the folder of the text part; the model must have one."""
        assert self._weights.text is not None
        if self._graph is not None:
            return self._graph.path / FOLDER
        write_text(self._weights.text, self._temporary, DEFAULT_NAME)
        return self._temporary

    @cached_property
    def fingerprint(self) -> Fingerprint:
        if self._graph is not None and self._weights.load is None:
            assert self._graph.fingerprint is not None
            return self._graph.fingerprint
        digest = self.images.weights_digest()
        if self._weights.text is not None:
            digest = digest_of_both(digest, text_digest(self.text_part))
        return self.images.preprocess.fingerprint(digest)


@dataclass(frozen=True)
class _Repository:
    """A Triton repository at `out`, and the request for a version of the models in it."""

    out: Path
    config: Mapping[str, Any]
    weights: Weights
    fingerprint: Fingerprint | None
    options: TritonOptions

    def export(self, name: str, tower: Callable[[], Tower], reporter: Reporter) -> Artifact:
        """Writes the version of one tower, unless it exists."""
        folder, version = self.out / name, self.config["version"]
        request = Request(
            "triton", {"name": name, **self.config}, (self.weights.parent,), self.fingerprint
        )
        refuse_foreign(self.out, folder)
        with lock_model(folder):
            if (artifact := find_published(folder / str(version), request)) is None:
                earlier = _read_earlier(folder, version, self.options)
                tower_to_write = tower()
                versions = _collect_facts(earlier, version, tower_to_write)
                with (
                    Draft(folder / str(version), request) as draft,
                    reporter.stage("export", None) as meter,
                ):
                    tower_to_write.write(draft.path)
                    meter.advance(1)
                    facts = tower_to_write.check(draft.path)
                    meter.advance(1, cosine=facts.get("parity_min_cosine"))
                    artifact = _publish(draft, tower_to_write, self.options, versions, facts)
            update_config(folder)
        return artifact


def read_versions(folder: Path) -> dict[int, Artifact]:
    """Returns the versions of a model in a repository, by number; empty without the folder."""
    folders = (
        path
        for path in folder.glob("[0-9]*")
        if path.name.isdecimal() and (path / MANIFEST).is_file()
    )
    return {int(path.name): open_artifact(path, "triton", verify_files=False) for path in folders}


def _open_exported(spec: str) -> Artifact | None:
    """Returns the model artifact at `spec`, whose graph can be copied; None for other weights."""
    if (
        not (Path(spec) / MANIFEST).is_file()
        or open_artifact(Path(spec), verify_files=False).kind != "model"
    ):
        return None
    return open_artifact(Path(spec), "model")


def refuse_foreign(out: Path, folder: Path) -> None:
    """Raises Conflict if `out` is an artifact, or if mlcd did not export the model in `folder`."""
    if (out / MANIFEST).is_file():
        raise Conflict(
            f"the output must be new or a Triton repository, got the artifact {out}",
            remedy="give another output directory",
        )
    if (folder / CONFIG_FILE).exists() and not read_versions(folder):
        raise Conflict(
            f"{folder} holds a model that mlcd did not export",
            remedy="give another --name or directory",
        )


@contextmanager
def lock_model(folder: Path) -> Iterator[None]:
    """Lets only one export to a model run at a time, because each lists all versions that it finds
    in config.pbtxt.
    """
    with translate_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock_directory(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)
        for created in (folder, folder.parent):  # still empty if the export failed
            with suppress(OSError):
                created.rmdir()


def _read_earlier(folder: Path, version: int, options: TritonOptions) -> dict[int, Artifact]:
    """Returns the existing versions; raises Conflict if `version` cannot be added to them."""
    earlier = read_versions(folder)
    if earlier and max(earlier) > version:
        raise Conflict(
            f"{folder} holds version {max(earlier)}", remedy=f"give --version {max(earlier) + 1}"
        )
    for artifact in earlier.values():
        if artifact.config["backend"] != options.backend:
            raise Conflict(
                f"all versions of a model need one backend, got {options.backend} and"
                f" {artifact.config['backend']} in {artifact.path}",
                remedy="give the backend of that version, or another --name or directory",
            )
    return earlier


def _collect_facts(
    earlier: dict[int, Artifact], version: int, tower: Tower
) -> dict[int, Mapping[str, str]]:
    """Returns each version's parameters in config.pbtxt; raises Conflict for different sizes,
    because config.pbtxt states them once.
    """
    facts = {version: tower.facts}
    for earlier_version, artifact in earlier.items():
        facts[earlier_version], sizes = read_facts(artifact)
        if sizes != tower.sizes:
            raise Conflict(
                f"all versions of a model need the same sizes, got {tower.sizes}; and {sizes} in"
                f" {artifact.path}",
                remedy="give another --name",
            )
    return facts


def _publish(
    draft: Draft,
    tower: Tower,
    options: TritonOptions,
    versions: Mapping[int, Mapping[str, str]],
    facts: Mapping[str, Any],
) -> Artifact:
    text = write_config(
        draft.out.parent.name,
        options,
        graph_input=tower.graph_input,
        dimension=tower.dimension,
        versions=versions,
        num_threads=options.num_threads or available_cores(),
    )
    with draft.write(CONFIG_FILE) as path:
        path.write_text(text)
    if options.backend == "python":
        with draft.write(SCRIPT) as path:
            shutil.copyfile(_SCRIPT_SOURCE, path)
    return draft.publish(
        fingerprint=tower.fingerprint, summary={**facts, "dimension": tower.dimension}
    )


def update_config(folder: Path) -> None:
    """Copies the newest version's config.pbtxt to the model's. It runs on every export, so that a
    rerun completes an export that was interrupted before.
    """
    versions = read_versions(folder)
    newest = versions[max(versions)].file(CONFIG_FILE).read_bytes()
    config_file = folder / CONFIG_FILE
    if config_file.is_file() and config_file.read_bytes() == newest:
        return
    with translate_os_errors(folder):
        write_synced(config_file, newest)
