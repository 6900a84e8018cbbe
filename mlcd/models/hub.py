"""The weights on Hugging Face's hub, for names of the form `hub:ORGANIZATION/MODEL` only."""

import re
from pathlib import Path
from typing import Final

from mlcd.errors import ConfigInvalid, Unavailable
from mlcd.extras import install_command

PREFIX: Final = "hub:"
_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_FILES: Final = ("*.json", "*.safetensors", "*.bin")


def looks_like_hub_name(spec: str) -> bool:
    """Tells whether a name is ORGANIZATION/MODEL without the prefix: it may mean the hub or be a
    mistyped path.
    """
    return _NAME.fullmatch(spec) is not None


def fetch(spec: str) -> Path:
    """Returns the local copy of `hub:ORGANIZATION/MODEL`, downloaded where it is missing; raises
    Unavailable offline.
    """
    name = spec.removeprefix(PREFIX)
    if not looks_like_hub_name(name):
        raise ConfigInvalid(f"a model of the hub is {PREFIX}ORGANIZATION/MODEL, got {spec}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigInvalid(
            "the hub needs the package huggingface_hub", remedy=install_command("hub")
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    # Errors of the library, of httpx and of the operating system all mean: not available now.
    except Exception as error:
        raise Unavailable(
            f"{name} cannot be fetched from the hub",
            remedy=f"check the name and the network, or run `hf download {name}` elsewhere and give"
            " its directory",
        ) from error
