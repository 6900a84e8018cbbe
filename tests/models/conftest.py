"""timm and torchvision are in .venv-models alone."""

from importlib.util import find_spec

if find_spec("timm") is None:
    collect_ignore_glob = ["test_*.py"]
