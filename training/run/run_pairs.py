"""Training on images with captions: builds the objects of a config and runs the loop."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlcd.artifacts.draft import find_published
from mlcd.artifacts.manifest import Artifact, Parent, Request, open_artifact
from mlcd.errors import ConfigInvalid
from mlcd.models.runs import find_checkpoint
from mlcd.models.servable_text import ServableText
from mlcd.models.text import TextTower
from mlcd.models.tokenizer import Tokenizer
from mlcd.models.zoo import LoadOptions
from mlcd.pipelines.encoded import check_source, images_parent
from mlcd.progress import Stages
from mlcd.randomness import Stream, hash_counters
from mlcd.training.checkpoint.checkpoint_store import CheckpointStore
from mlcd.training.data.loader import StepBatches
from mlcd.training.pairs.cached_views import image_views
from mlcd.training.pairs.contents import PairContents
from mlcd.training.pairs.features import image_embeddings
from mlcd.training.pairs.pair_batches import Features, PairBatch, PairedRows, PairReader
from mlcd.training.pairs.pairs_config import MAX_LOG_SCALE, PairsConfig
from mlcd.training.pairs.pairs_dataset import PairSet, match_embeddings, open_pairs
from mlcd.training.pairs.pairs_flops import pair_flops
from mlcd.training.pairs.pairs_state import PairState, initial_state
from mlcd.training.pairs.pairs_step import PairMeters, pair_step
from mlcd.training.pairs.tokens import CaptionTokens, digest, end_of_text, open_tokenizer
from mlcd.training.processes import Processes, open_processes
from mlcd.training.run.any_run import choose_algorithms, open_draft, open_tower_start, train_to_end
from mlcd.training.run.changed_settings import check_same_settings
from mlcd.training.run.run_files import log_paths, summarize_outcome, write_config
from mlcd.training.tower import initial_model

_SAMPLED = 256  # captions whose length is measured to estimate the FLOPs of a step


@dataclass(frozen=True)
class TextStart:
    """The text side at step 0.

    log_scale, bias: values stored with the weights; None for random weights. parent: identity of
    the weights.
    """

    tower: TextTower
    tokenizer: Tokenizer
    log_scale: float | None = None
    bias: float | None = None
    parent: Parent | None = None


@dataclass(frozen=True)
class PairTraining:
    """A training on pairs: the state with its pairs."""

    state: PairState
    reader: PairReader
    config: PairsConfig

    @contextmanager
    def load(self) -> Iterator[Iterator[StepBatches[PairBatch]]]:
        """Opens the batches of all remaining steps, starting at `state.step`."""
        with (
            self.reader.open(self.state.step) as read,
            self.state.copies.prefetch_first_images(read) as steps,
        ):
            yield steps

    def step(
        self,
        batch: StepBatches[PairBatch],
        shares: Sequence[float],
        row_counts: Sequence[Sequence[int]],
    ) -> PairMeters:
        """Updates the state once, without advancing `state.step`."""
        del shares  # all pairs have the same weight
        return pair_step(self.state, batch.parts, sum(map(sum, row_counts)), self.config)

    def evaluate(self) -> None:
        """Returns None: a training on pairs lacks an evaluation."""
        return


def run_pairs(config: PairsConfig, reporter: Stages, *, cores: int | None = None) -> Artifact:
    """Trains or resumes training, and publishes the run at `config.out`.

    For processes, resuming and errors see `mlcd.training.run.run_training.run_training`.
    """
    with open_processes(config.device, config.num_threads, cores) as processes:
        processes.meet("the start")
        return _run(config, reporter, processes)


def _run(config: PairsConfig, reporter: Stages, processes: Processes) -> Artifact:
    choose_algorithms(config, processes.device)
    out = Path(config.out)
    with processes.failing_together():
        pairs = open_pairs(config)
        check_source(pairs.source, out)
        _check_batch(config, len(pairs))
        start = open_tower_start(config)
        model = initial_model(config.model, config.seed, start)
        text = _open_text_start(config, out)
        features: PairedRows | None = None
        if config.data.cached_views:
            features = image_views(config, model, pairs, processes, reporter)
        elif config.cached:
            embeddings = image_embeddings(config, model, pairs.source, processes, reporter)
            pairs, rows = match_embeddings(pairs, embeddings)
            features = Features(embeddings, rows)
        parents = [images_parent(pairs.source, out)]
        parents += [
            source.parent for source in (start, text) if source is not None and source.parent
        ]
        if features is not None:
            parents.append(features.artifact.as_parent_of(out, "embeddings"))
        request = _build_request(config, pairs, text, tuple(parents))
        check_same_settings(out, request)
        published = find_published(out, request)
    if published is not None:
        return published
    with open_draft(out, request, processes) as draft:
        with processes.failing_together():
            tokens = CaptionTokens.of(text.tokenizer, text.tower.config)
            state = initial_state(
                config, processes, model, text.tower, _initial_scalars(config, text)
            )
            if processes.world.rank == 0:
                write_config(config, draft.path)
            store = CheckpointStore(
                draft.path,
                config.checkpoint,
                processes,
                parents=request.parents,
                contents=PairContents(text.tokenizer),
            )
        reader = PairReader(pairs, tokens, features, config, processes)
        work = PairTraining(state, reader, config)
        flops = pair_flops(config, text.tower.config, _count_tokens(pairs, tokens))
        train_to_end(work, config, draft.path, store, processes, reporter, flops=flops)
        processes.meet("the end")
        if processes.world.rank == 0:
            last = open_artifact(find_checkpoint(draft.path), verify_files=False)
            summary = {
                "samples": len(pairs),
                "without_caption": pairs.num_without,
                **summarize_outcome(draft.path, state),
            }
            logs = log_paths(draft.path)
            draft.publish(fingerprint=last.fingerprint, summary=summary, logs=logs)
    processes.meet("the end")
    return open_artifact(out, "run", verify_files=False)


def _check_batch(config: PairsConfig, num_pairs: int) -> None:
    """Raises ConfigInvalid if the batch is larger than the data set: an image would be its own
    negative in every batch. A batch across two epochs may still contain an image twice.
    """
    if config.schedule.batch_size > num_pairs:
        raise ConfigInvalid(
            f"schedule.batch_size must be at most the {num_pairs} images with captions, got "
            f"{config.schedule.batch_size}",
            remedy="lower schedule.batch_size",
        )


def _open_text_start(config: PairsConfig, out: Path) -> TextStart:
    """Returns the text tower of text.start, or a random one from the seed.

    Raises ConfigInvalid if text.start lacks a text tower, or one of another dimension.
    """
    if config.text.start is not None:
        return _load_text(config.text.start, config, out)
    tokenizer = open_tokenizer(config.text)
    tower = TextTower(
        config.text.tower(
            vocab_size=tokenizer.num_ids,
            eos_token_id=end_of_text(tokenizer),
            embedding_dim=config.model.output_dim,
        )
    )
    seed = int(hash_counters(config.seed, Stream.TEXT_TOWER)[0])
    tower.initialize(torch.Generator().manual_seed(seed))
    return TextStart(tower, tokenizer)


def _load_text(spec: str, config: PairsConfig, out: Path) -> TextStart:
    # Imported here, because it imports onnx and an inference engine, which other runs do not need.
    from mlcd.export.model_artifact import find_weights

    weights = find_weights(spec, out, LoadOptions())
    if weights.text is None or weights.text.load is None:
        raise ConfigInvalid(
            f"{spec} must have a text tower with weights",
            remedy="leave out text.start, or set it to a model with a text tower",
        )
    text: ServableText = weights.text.load()
    if text.settings.dimension != config.model.output_dim:
        raise ConfigInvalid(
            f"text embeddings must have the {config.model.output_dim} dimensions of the image "
            f"embeddings, got {text.settings.dimension} from {spec}",
            remedy="start both towers from the same model",
        )
    return TextStart(
        text.trunk,
        text.tokenizer,
        text.settings.logit_scale,
        text.settings.logit_bias,
        replace(weights.parent, role="text"),
    )


def _initial_scalars(config: PairsConfig, text: TextStart) -> dict[str, float]:
    """Returns the initial values of the scale's logarithm and, for siglip, of the bias."""
    loss = config.loss
    log_scale = math.log(loss.default_scale) if text.log_scale is None else text.log_scale
    if loss.scale is not None:
        log_scale = math.log(loss.scale)
    scalars = {"log_scale": min(max(log_scale, 0.0), MAX_LOG_SCALE)}
    if loss.kind == "siglip":
        bias = -math.log(config.schedule.batch_size - 1) if text.bias is None else text.bias
        scalars["bias"] = bias if loss.bias is None else loss.bias
    return scalars


def _build_request(
    config: PairsConfig, pairs: PairSet, text: TextStart, parents: tuple[Parent, ...]
) -> Request:
    facts: dict[str, Any] = {"captions": pairs.digest(), "tokenizer": digest(text.tokenizer)}
    return Request("run", {**config.identity(), **facts}, parents)


def _count_tokens(pairs: PairSet, tokens: CaptionTokens) -> int:
    rows = np.arange(min(_SAMPLED, len(pairs)))
    return tokens.ids(pairs.draw(rows, rows, 0)).shape[1]
