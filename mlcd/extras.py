"""Finds the command that installs a missing package, from the metadata of the installed mlcd.

An extra is installed from the source that mlcd was installed from: a checkout, a wheel or an index.
"""

import json
import re
import shlex
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME: Final = "mlcd"
# distributions of modules with a different name
_DISTRIBUTIONS: Final = {
    "PIL": "pillow",
    "faiss": "faiss-cpu",
    "google": "protobuf",
    "grpc": "grpcio",
    "lance": "pylance",
    "opentelemetry": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_NOT_FOR_USERS: Final = "dev"


def install_command(*extras: str) -> str:
    """Returns the command that adds these extras to this installation.

    If the source that mlcd was installed from is missing, it names the packages of the extras.
    """
    try:
        own = distribution(_NAME)
    except PackageNotFoundError:  # a checkout on the path that is not installed
        return _format_pip(f"{Path(__file__).resolve().parents[1]}[{','.join(extras)}]")
    origin = json.loads(own.read_text("direct_url.json") or "null")
    if origin is None:
        return _format_pip(f"{_NAME}[{','.join(extras)}]")
    url = origin["url"]
    path = Path(url2pathname(urlsplit(url).path))
    if urlsplit(url).scheme == "file" and not path.exists():
        tables = _read_requirements(own)
        return _format_pip(
            *dict.fromkeys(requirement for extra in extras for requirement in tables.get(extra, ()))
        )
    if "dir_info" not in origin:
        return _format_pip(f"{_NAME}[{','.join(extras)}] @ {_format_url(url, origin)}")
    editable = ("-e",) if origin["dir_info"].get("editable") else ()
    return _format_pip(*editable, f"{path}[{','.join(extras)}]")


def install_command_for(package: str, *, likely: str | None = None) -> str:
    """Returns the command that installs a distribution.

    The command names the extra that requires the distribution and has the fewest missing packages,
    or else the distribution. package: name of the distribution, or of a module in it. likely: extra
    to prefer if it requires the distribution.
    """
    name = distribution_of(package)
    try:
        tables = _read_requirements(distribution(_NAME))
    except PackageNotFoundError:
        return _format_pip(name)
    for requirement in tables.pop("", ()):
        if _parse_name(requirement) == name:
            return _format_pip(requirement)
    tables.pop(_NOT_FOR_USERS, None)
    num_missing = {
        extra: sum(not _is_installed(_parse_name(line)) for line in requirements)
        for extra, requirements in tables.items()
        if name in map(_parse_name, requirements)
    }
    if not num_missing:
        return _format_pip(name)
    extra = (
        likely
        if likely in num_missing
        else min(num_missing, key=lambda candidate: num_missing[candidate])
    )
    return install_command(extra)


def missing_package(error: ImportError) -> str:
    """Returns the name of the distribution that a failed import needs."""
    return distribution_of(error.name) if error.name else str(error)


def _format_url(url: str, origin: dict[str, Any]) -> str:
    """Returns the URL of a wheel or a commit in the form that pip accepts."""
    vcs = origin.get("vcs_info")
    if vcs is not None:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{url}#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else url


def distribution_of(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in _DISTRIBUTIONS:
            return _DISTRIBUTIONS[name]
    return _normalize_name(parts[0])


def _read_requirements(own: Distribution) -> dict[str, list[str]]:
    """Returns the requirements of each extra; those of mlcd itself under the empty name."""
    tables: dict[str, list[str]] = {"": []}
    for line in own.requires or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra *== *['\"]([^'\"]+)['\"]", marker)
        tables.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return tables


def _parse_name(requirement: str) -> str:
    return _normalize_name(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _format_pip(*arguments: str) -> str:
    return f"pip install {shlex.join(arguments)}"
