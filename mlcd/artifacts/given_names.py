"""The names of centers that people give: a file beside those of the Centers artifact, and no part
of its identity.

    given-names.json  {"centers": digest of the artifact, "names": [k] of name or null,
                      "checksum": SHA-256 of the rest}

It is in no manifest, so that naming changes no digest, and carries its own checksum instead.
"""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.disk import refuse_full_disk, translated_os_errors, write_synced
from mlcd.artifacts.manifest import Artifact
from mlcd.errors import ArtifactInvalid, InvalidInput, NotFound

GIVEN_NAMES: Final = "given-names.json"
MAX_NAME: Final = 200  # characters, because a name is shown in one line
_HEADER: Final = ("id", "name")

Names = tuple[str | None, ...]


def read_given_names(artifact: Artifact, num_centers: int) -> Names | None:
    """Returns the given names; None where there are none.

    Raises ArtifactInvalid for a file that is damaged or belongs to other centers.
    """
    path = artifact.path / GIVEN_NAMES
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        names = tuple(stored["names"])
        intact = stored == _sealed(stored["centers"], names)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if not intact:
        raise _damaged(path)
    if stored["centers"] != artifact.digest or len(names) != num_centers:
        raise ArtifactInvalid(
            f"{path} names other centers", remedy="remove it, and name these by `mlcd name`"
        )
    return names


def write_given_names(artifact: Artifact, names: Names) -> None:
    """Writes the names; either all new names or all old ones are there."""
    path = artifact.path / GIVEN_NAMES
    content = json.dumps(_sealed(artifact.digest, names), indent=2, ensure_ascii=False) + "\n"
    try:
        with translated_os_errors(path):
            write_synced(path, content.encode())
    except OSError as error:
        refuse_full_disk(error, path)
        raise


def read_names_file(path: Path, num_centers: int) -> dict[int, str | None]:
    """Reads {center: name, or None to remove it} from a JSON object, or from lines `id<TAB>name` or
    `id,name`.

    Raises NotFound, and InvalidInput naming the first id or name that is not allowed.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is no text in UTF-8", remedy="save it as UTF-8") from error
    except OSError as error:
        raise NotFound(f"{path} cannot be read", remedy="give a file of names") from error
    pairs = _json_pairs(path, text) if text.lstrip().startswith("{") else _line_pairs(path, text)
    found: dict[int, str | None] = {}
    for identifier, name in pairs:
        center = _checked_id(path, identifier, num_centers)
        if center in found:
            raise InvalidInput(
                f"{path} names center {center} twice", remedy="give each center one name"
            )
        found[center] = _checked_name(path, center, name)
    if not found:
        raise InvalidInput(
            f"{path} holds no name", remedy='give JSON like {"3": "cat"}, or lines of id<TAB>name'
        )
    return found


def renamed(
    names: Sequence[str | None] | None, changes: Mapping[int, str | None], num_centers: int
) -> Names:
    """Returns the names with the changes; those of other centers stay."""
    before = [None] * num_centers if names is None else names
    return tuple(changes.get(center, name) for center, name in enumerate(before))


def _json_pairs(path: Path, text: str) -> list[tuple[str, Any]]:
    try:
        # a dict would hide duplicate keys
        pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    except ValueError as error:
        raise InvalidInput(
            f"{path} is no valid JSON: {error}", remedy='give an object like {"3": "cat"}'
        ) from error
    return pairs


def _line_pairs(path: Path, text: str) -> list[tuple[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip()]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    try:
        rows = list(csv.reader(lines, delimiter=delimiter))
    except csv.Error as error:
        raise InvalidInput(
            f"{path} is no table: {error}", remedy="give lines of id<TAB>name"
        ) from error
    for number, row in enumerate(rows, start=1):
        if len(row) != len(_HEADER):
            raise InvalidInput(
                f"line {number} of {path} is no id and name", remedy="give lines of id<TAB>name"
            )
    if rows and tuple(cell.strip().lower() for cell in rows[0]) == _HEADER:
        del rows[0]
    return [(identifier, name) for identifier, name in rows]


def _checked_id(path: Path, identifier: str, num_centers: int) -> int:
    plain = identifier.strip()
    if not (plain.isascii() and plain.isdecimal() and int(plain) < num_centers):
        raise InvalidInput(
            f"{identifier!r} in {path} is the id of no center",
            remedy=f"there are {num_centers}: 0 to {num_centers - 1}",
        )
    return int(plain)


def _checked_name(path: Path, center: int, name: object) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or len(name.strip()) > MAX_NAME or not name.strip().isprintable():
        raise InvalidInput(
            f"what {path} gives center {center} is no name",
            remedy=f"give printable text of at most {MAX_NAME} characters",
        )
    return name.strip() or None


def _sealed(digest: str, names: Names) -> dict[str, Any]:
    content = {"centers": digest, "names": list(names)}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return {**content, "checksum": hashlib.sha256(canonical.encode()).hexdigest()}


def _damaged(path: Path) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"{path} is damaged or was edited",
        remedy="remove it, and name the centers again by `mlcd name --set`",
    )
