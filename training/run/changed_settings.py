"""The comparison of the settings of a run with those that it was begun with."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import MANIFEST, Request, open_artifact
from mlcd.errors import Conflict

_NOT_SET: Final = "not set"


def read_identity(out: Path) -> dict[str, Any] | None:
    """Returns the identity of the run at `out`, finished or not; None where there is none."""
    if (out / MANIFEST).is_file():
        identity = open_artifact(out, verify_files=False).request().identity()
    else:
        identity = Draft(out, Request("run", {}, ())).read_request() or {}
    return identity if identity.get("kind") == "run" else None


def check_same_settings(out: Path, request: Request) -> None:
    """Raises Conflict naming the settings by which the request differs from the run at `out`."""
    begun = read_identity(out)
    if begun and (changes := find_changes(begun["config"], request.config)):
        raise Conflict(
            f"{out} was begun with other settings: {describe_changes(changes)}",
            remedy="give another output directory, or go on with `mlcd train --resume`",
        )


def find_changes(
    begun: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns (value before, value now) of each wanted setting that differs, by its dotted name."""
    before = dict(_flat(begun))
    pairs = {name: (before.get(name, _NOT_SET), value) for name, value in _flat(settings)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{name}={_describe(now)}, before {_describe(before)}"
        for name, (before, now) in changes.items()
    )


def with_changes(begun: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `begun` with the values of `changes`, section by section."""
    return {
        **begun,
        **{
            name: with_changes(begun.get(name, {}), value) if isinstance(value, Mapping) else value
            for name, value in changes.items()
        },
    }


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _describe(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
