"""Keeps the names that users gave to groups while the pictures are clustered again."""

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
    """Writes the pictures of each name, before their clustering is removed.

    names: names that users gave, by center id. Without labels nothing is written, and the file of
    an interrupted run stays.
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


def restore_names(state: PlaceState, set_name: Callable[[int, str], None]) -> None:
    """Gives each saved name to the new group with more than half of its pictures.

    set_name: names a center. If two names match one group, the name with more pictures wins.
    """
    path = state.path / _FILE
    if not path.is_file():
        return
    groups: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    labels = LabelTable.open(state.labels)
    centers_by_key = dict(zip(labels.keys, labels.ids[:, 0].tolist(), strict=True))
    names: dict[int, tuple[int, str]] = {}
    for name, keys in groups.items():
        counts = Counter(centers_by_key[key] for key in keys if key in centers_by_key)
        for center, num in counts.most_common(1):
            if 2 * num > counts.total():
                names[center] = max(names.get(center, (0, "")), (num, name))
    for center, (_, name) in names.items():
        set_name(center, name)
    path.unlink()
