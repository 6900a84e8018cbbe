"""Multi-label cluster discrimination: raw images to embeddings, clusters and labels.

The names below are opened at their first use, so that `import mlcd` takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlcd.version import __version__

if TYPE_CHECKING:
    from mlcd.api import (
        EmbeddedImages,
        EmbeddedTexts,
        Index,
        Labels,
        Matches,
        Model,
        cluster,
        embed,
        embed_texts,
        index,
        label,
        load_model,
    )
    from mlcd.artifacts.centers import Centers
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.errors import MlcdError
    from mlcd.explored_photos import ExploredPhotos, explore

__all__ = [
    "Centers",
    "EmbeddedImages",
    "EmbeddedTexts",
    "EmbeddingsArtifact",
    "ExploredPhotos",
    "Index",
    "Labels",
    "Matches",
    "MlcdError",
    "Model",
    "__version__",
    "cluster",
    "embed",
    "embed_texts",
    "evaluate",
    "explore",
    "index",
    "label",
    "load_model",
    "train",
]

_ELSEWHERE = {
    "Centers": "mlcd.artifacts.centers",
    "EmbeddingsArtifact": "mlcd.artifacts.embeddings",
    "ExploredPhotos": "mlcd.explored_photos",
    "MlcdError": "mlcd.errors",
    # of a product: opened by its name, because the core imports none
    "evaluate": "mlcd.training.functions",
    "explore": "mlcd.explored_photos",
    "train": "mlcd.training.functions",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mlcd' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "mlcd.api")), name)


def __dir__() -> list[str]:
    return __all__
