"""Evaluates models on all present data sets: computes features once, then runs each evaluation.

All results are artifacts in the output directory, so the same command resumes an interrupted run:
MODEL/features/NAME, MODEL/linear-probe/NAME and MODEL/zero-shot/NAME. The report is written last.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import MANIFEST, Artifact, open_artifact
from mlcd.encoders import has_text, open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.images.quiet import silence_decoders
from mlcd.images.sources import open_source
from mlcd.pipelines.embed import embed
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter
from mlcd.training.evaluation.label_tables import SeveralLabels, read_labels
from mlcd.training.evaluation.report import (
    LabelsProtocol,
    ProbeProtocol,
    Protocol,
    Subject,
    evaluate_all,
)
from mlcd.training.evaluation.representations import digest_rows, distinct_names
from mlcd.training.evaluation.seen import find_seen
from mlcd.training.evaluation.stored_results import Record
from mlcd.training.evaluation.suite.definitions import SETS
from mlcd.training.evaluation.suite.set_files import FoundSet, check_hashes, check_set, find_sets
from mlcd.training.evaluation.texts.evaluate import TextEvaluation, evaluate_zero_shot
from mlcd.training.evaluation.texts.imagenet import IMAGENET
from mlcd.training.evaluation.texts.images_and_texts import TextImageModel, open_model
from mlcd.training.evaluation.texts.prompt_sets import Prompts, read_prompts
from mlcd.training.evaluation.texts.tested import open_test_images

_OWN_PROMPTS = "simple"
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Line:
    """The results of one model on one data set.

    metric: the data set's metric, for both evaluations. seen: numbers of images that the model's
    run has seen, and unknown parts; None if unknown. reasons: why results are missing, by
    evaluation.
    """

    name: str
    title: str
    metric: str
    probe: Record | None
    zero_shot: Record | None
    seen: dict[str, Any] | None
    reasons: dict[str, str]

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Suite:
    """The results of one model: a line per present data set, and the names of missing ones.

    model: name of the model, unique in the report.
    """

    model: str
    fingerprint: str
    lines: tuple[Line, ...]
    missing: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "sets": [line.facts() for line in self.lines],
            "missing": list(self.missing),
        }


def run_suites(
    data: Path,
    specs: Sequence[str],
    out: Path,
    *,
    names: Sequence[str],
    options: EncoderOptions,
    announce: Callable[[str], None],
    reporter: Reporter,
) -> list[Suite]:
    """Evaluates each model on the data sets in `data`; a damaged one gets a reason, not results.

    names: data sets to evaluate; empty for all. Raises NotFound if no data set is present.
    """
    sets = _choose_sets(data, names)
    distinct = list(dict.fromkeys(specs))
    models = [
        _Evaluated(name, resolve_model(spec, announce), out / name, options, announce, reporter)
        for name, spec in zip(_names(distinct), distinct, strict=True)
    ]
    silence_decoders()
    faults = {
        data_set.name: fault for data_set in sets if (fault := _find_fault(data_set)) is not None
    }
    return [model.suite(sets, faults) for model in models]


@dataclass(frozen=True)
class _Evaluated:
    """One model under evaluation.

    path: argument of `mlcd.encoders.open_encoder`. out: directory of the model's results.
    """

    name: str
    path: str
    out: Path
    options: EncoderOptions
    announce: Callable[[str], None]
    reporter: Reporter

    def suite(self, sets: Sequence[FoundSet], faults: Mapping[str, str]) -> Suite:
        """Evaluates the data sets without faults; the others get their fault as the reason."""
        intact = [data_set for data_set in sets if data_set.name not in faults]
        fingerprint, unreadable = self._embed(intact)
        readable = [data_set for data_set in intact if data_set.name not in unreadable]
        changed = {
            data_set.name: fault
            for data_set in readable
            if (fault := self._find_change(data_set)) is not None
        }
        unchanged = [data_set for data_set in readable if data_set.name not in changed]
        reasons: dict[str, Record | str] = {**faults, **unreadable, **changed}
        probes = {
            data_set.name: _attempt(partial(self._probe, data_set)) for data_set in unchanged
        } | reasons
        zero_shots = self._zero_shots(unchanged) | reasons
        artifact = _artifact(self.path)
        lines = [
            Line(
                data_set.name,
                data_set.name if data_set.definition is None else data_set.definition.title,
                "accuracy" if data_set.definition is None else data_set.definition.metric,
                _record(probes[data_set.name]),
                _record(zero_shots[data_set.name]),
                _count_seen(artifact, self._features(data_set)),
                _reasons(probes[data_set.name], zero_shots[data_set.name]),
            )
            for data_set in sets
        ]
        names = {data_set.name for data_set in sets}
        missing = tuple(name for name in SETS if name not in names)
        return Suite(self.name, fingerprint, tuple(lines), missing)

    def _features(self, data_set: FoundSet) -> Path:
        return self.out / "features" / data_set.name

    def _embed(self, sets: Sequence[FoundSet]) -> tuple[str, dict[str, str]]:
        """Embeds each data set into its artifact.

        Returns the model's fingerprint, and the reasons of data sets that could not be embedded.
        """
        with closing(open_encoder(self.path, self.options)) as encoder:

            def features_of(data_set: FoundSet) -> Artifact:
                source = open_source(str(data_set.images))
                return embed(source, encoder, self._features(data_set), self.reporter)

            outcomes = {
                data_set.name: _attempt(partial(features_of, data_set)) for data_set in sets
            }
            return encoder.fingerprint, {
                name: reason for name, reason in outcomes.items() if isinstance(reason, str)
            }

    def _find_change(self, data_set: FoundSet) -> str | None:
        """Returns how the embedded images differ from the checksums; None if they match."""
        features = EmbeddingsArtifact.open(self._features(data_set))
        try:
            check_hashes(data_set, dict(zip(features.keys, features.image_sha256, strict=True)))
        except MlcdError as error:
            return str(error)
        return None

    def _probe(self, data_set: FoundSet) -> Record:
        metric = "accuracy" if data_set.definition is None else data_set.definition.metric
        labels = _labels(data_set)
        protocol: Protocol
        if metric == "map-11":
            assert labels is not None
            protocol = LabelsProtocol("embedding", labels, None)
        else:
            protocol = ProbeProtocol("embedding", metric, None)
        (record,) = evaluate_all(
            [self._features(data_set)],
            protocol,
            Subject(split=data_set.split),
            out=self.out / "linear-probe" / data_set.name,
            reporter=self.reporter,
        )
        return record

    def _zero_shots(self, sets: Sequence[FoundSet]) -> dict[str, Record | str]:
        if not has_text(self.path):
            return dict.fromkeys(
                [data_set.name for data_set in sets], "the model lacks a text tower"
            )
        with open_model(self.path, self.options, self.announce) as model:
            return {
                data_set.name: _attempt(partial(self._zero_shot, model, data_set))
                for data_set in sets
            }

    def _zero_shot(self, model: TextImageModel, data_set: FoundSet) -> Record:
        if data_set.labels is not None:
            raise InvalidInput("zero-shot requires one class per image, got several labels")
        test_images = open_test_images(str(self._features(data_set)))
        # The report shows the number of seen images beside the results.
        request = TextEvaluation(
            test_images, may_be_seen=True, out=self.out / "zero-shot" / data_set.name
        )
        return evaluate_zero_shot(model, request, _prompts(data_set), data_set.names, self.reporter)


def _names(specs: Sequence[str]) -> list[str]:
    return distinct_names([Path(spec) for spec in specs])


def _choose_sets(data: Path, names: Sequence[str]) -> list[FoundSet]:
    if not data.is_dir():
        raise NotFound(f"{data} is not a folder")
    sets = find_sets(data)
    present = {data_set.name for data_set in sets}
    if absent := [name for name in names if name not in present]:
        raise NotFound(
            f"data set {absent[0]} is missing in {data}", remedy=f"present: {sorted(present)}"
        )
    chosen = [data_set for data_set in sets if not names or data_set.name in names]
    if not chosen:
        raise NotFound(
            f"{data} must contain at least one data set",
            remedy="docs/how-to/suite.md describes the layout of the files",
        )
    return chosen


def _labels(data_set: FoundSet) -> SeveralLabels | None:
    return None if data_set.labels is None else read_labels(data_set.labels)


def _find_fault(data_set: FoundSet) -> str | None:
    """Returns why a data set cannot be evaluated; None if it can."""
    try:
        source = open_source(str(data_set.images))
        source.check_not_empty()
        check_set(data_set, source, _labels(data_set))
    except MlcdError as error:
        return str(error)
    return None


def _attempt(make: Callable[[], _Made]) -> _Made | str:
    """Calls `make` and returns its result, or the message of its InvalidInput."""
    try:
        return make()
    except InvalidInput as error:
        return str(error)


def _record(outcome: Record | str) -> Record | None:
    return None if isinstance(outcome, str) else outcome


def _reasons(probe: Record | str, zero_shot: Record | str) -> dict[str, str]:
    outcomes = {"linear-probe": probe, "zero-shot": zero_shot}
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}


def _prompts(data_set: FoundSet) -> Prompts:
    if data_set.definition is None:
        return read_prompts(_OWN_PROMPTS)
    return read_prompts("clip" if data_set.name == IMAGENET else data_set.name)


def _artifact(path: str) -> Artifact | None:
    if not (Path(path) / MANIFEST).is_file():
        return None
    return open_artifact(Path(path), verify_files=False)


def _count_seen(artifact: Artifact | None, features: Path) -> dict[str, Any] | None:
    """Returns the numbers of a data set's images that the model's run has seen; None if unknown."""
    if artifact is None or not (features / MANIFEST).is_file():
        return None
    digests = digest_rows(EmbeddingsArtifact.open(features).image_sha256)
    return find_seen(artifact).among(digests).facts() | {"of": len(digests)}
