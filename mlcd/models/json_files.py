"""The JSON files beside the weights of other projects."""

import json
from pathlib import Path
from typing import Any

from mlcd.errors import ArtifactInvalid


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ArtifactInvalid for other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read as JSON", remedy="restore the file"
        ) from error
    if not isinstance(content, dict):
        raise ArtifactInvalid(f"{path} must hold a JSON object", remedy="restore the file")
    return content
