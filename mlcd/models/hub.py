"""Downloads weights from Hugging Face's hub, only for names `hub:ORGANIZATION/MODEL`."""

import re
from pathlib import Path
from typing import Final

from mlcd.errors import ConfigInvalid, Unavailable
from mlcd.extras import install_command

PREFIX: Final = "hub:"
_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_FILES: Final = ("*.json", "*.safetensors", "*.bin")


def looks_like_hub_name(spec: str) -> bool:
    """Tells whether a name has the form ORGANIZATION/MODEL: it may be a model of the hub or a
    mistyped path.
    """
    return _NAME.fullmatch(spec) is not None


def fetch(spec: str) -> Path:
    """Returns the local copy of `hub:ORGANIZATION/MODEL`, downloaded if missing; raises
    Unavailable if the hub cannot be reached.
    """
    name = spec.removeprefix(PREFIX)
    if not looks_like_hub_name(name):
        raise ConfigInvalid(f"a hub model must be {PREFIX}ORGANIZATION/MODEL, got {spec}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigInvalid(
            "the hub needs the package huggingface_hub", remedy=install_command("hub")
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    # The library, httpx and the operating system raise many types; all mean: not available now.
    except Exception as error:
        raise Unavailable(
            f"{name} cannot be fetched from the hub",
            remedy=f"check the name and the network, or run `hf download {name}` elsewhere and give"
            " its directory",
        ) from error
