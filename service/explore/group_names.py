"""The names that people gave to groups, kept while the pictures are grouped anew."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from mlcd.artifacts.disk import replacing
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import MANIFEST
from mlcd.service.explore.place_state import PlaceState

_FILE: Final = "kept-names.json"


def save_names(state: PlaceState, names: Mapping[int, str]) -> None:
    """Writes which pictures each name belongs to, before their grouping is removed.

    names: those that people gave, by the center's id. Without labels nothing is written, and what
    an interrupted run has kept stays.
    """
    if not names or not (state.labels / MANIFEST).is_file():
        return
    groups: dict[str, list[str]] = {name: [] for name in names.values()}
    labels = LabelTable.open(state.labels)
    for key, center in zip(labels.keys, labels.ids[:, 0].tolist(), strict=True):
        if center in names:
            groups[names[center]].append(key)
    with replacing(state.path / _FILE) as temporary:
        temporary.write_text(json.dumps(groups), encoding="utf-8")


def restore_names(state: PlaceState, give: Callable[[int, str], None]) -> None:
    """Gives each kept name to the new group that holds more than half of its pictures.

    give: names a center. Of two names for one group the one of more pictures is given.
    """
    path = state.path / _FILE
    if not path.is_file():
        return
    groups: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    labels = LabelTable.open(state.labels)
    center_of = dict(zip(labels.keys, labels.ids[:, 0].tolist(), strict=True))
    chosen: dict[int, tuple[int, str]] = {}
    for name, keys in groups.items():
        centers = Counter(center_of[key] for key in keys if key in center_of)
        for center, num in centers.most_common(1):
            if 2 * num > centers.total():
                chosen[center] = max(chosen.get(center, (0, "")), (num, name))
    for center, (_, name) in chosen.items():
        give(center, name)
    path.unlink()
