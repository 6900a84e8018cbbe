"""Compares the settings of a run with the settings that it was started with."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import MANIFEST, Request, open_artifact
from mlcd.errors import Conflict

_NOT_SET: Final = "not set"


def read_identity(out: Path) -> dict[str, Any] | None:
    """Returns the identity of the run at `out`, finished or not; None without a run."""
    if (out / MANIFEST).is_file():
        identity = open_artifact(out, verify_files=False).request().identity()
    else:
        identity = Draft(out, Request("run", {}, ())).read_request() or {}
    return identity if identity.get("kind") == "run" else None


def check_same_settings(out: Path, request: Request) -> None:
    """Raises Conflict naming the settings that differ from those of the run at `out`."""
    stored = read_identity(out)
    if stored and (changes := find_changes(stored["config"], request.config)):
        raise Conflict(
            f"{out} was started with other settings: {describe_changes(changes)}",
            remedy="give another output directory, or resume with `mlcd train --resume`",
        )


def find_changes(
    stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns {dotted name: (stored value, new value)} of the settings that differ."""
    stored_values = dict(_flatten(stored))
    pairs = {name: (stored_values.get(name, _NOT_SET), value) for name, value in _flatten(settings)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{name}={_describe(value)}, before {_describe(stored_value)}"
        for name, (stored_value, value) in changes.items()
    )


def merge_changes(stored: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `stored` with the values of `changes`, merged by section."""
    return {
        **stored,
        **{
            name: merge_changes(stored.get(name, {}), value)
            if isinstance(value, Mapping)
            else value
            for name, value in changes.items()
        },
    }


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _describe(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
