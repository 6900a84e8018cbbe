"""The text tower of the served model, with its own engine, dispatcher and pipeline."""

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from mlcd.models.tokenizer import Tokenizer
from mlcd.service.inference.admission import Places
from mlcd.service.inference.cache.cached import TowerCache
from mlcd.service.inference.cache.keyspace import KeySpace
from mlcd.service.inference.contract import Dispatcher, Engine
from mlcd.service.inference.outcomes import Encoding
from mlcd.service.inference.readiness import ReadinessProbe
from mlcd.service.inference.served import ServedTextEncoder
from mlcd.service.inference.text_pipeline import TextPipeline, TextReader
from mlcd.service.settings import Limits
from mlcd.service.telemetry.text_metrics import TextMetrics

TRIAL: Final = "a photo"  # the text of trial inferences


@dataclass(frozen=True)
class ServedTexts:
    """The text tower. reader: tokenizes texts. pipeline: encodes tokens to embeddings."""

    engine: Engine
    dispatcher: Dispatcher
    encoder: ServedTextEncoder
    reader: TextReader
    pipeline: Encoding
    metrics: TextMetrics
    probe: ReadinessProbe


def new_text_tower(
    engine: Engine,
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    *,
    places: Places,
    cache: TowerCache | None,
    thread: Executor,
    limits: Limits,
    metrics: TextMetrics,
) -> ServedTexts:
    """Builds the tower on its engine. thread: executor of the tokenizer."""
    encoder = engine.served
    assert isinstance(encoder, ServedTextEncoder)
    texts = TextPipeline(engine, dispatcher, places, metrics=metrics)
    if cache is None:
        pipeline: Encoding = texts
    else:
        pipeline = cache.before(texts, KeySpace.of_texts(encoder, cache.vectors))
    reader = TextReader(tokenizer, thread, max_chars=limits.max_text_chars, metrics=metrics)
    probe = ReadinessProbe(engine, dispatcher, tokenizer([TRIAL])[0])
    return ServedTexts(engine, dispatcher, encoder, reader, pipeline, metrics, probe)
