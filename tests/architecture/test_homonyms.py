"""The names of modules and classes: each occurs once, but for those that every room has."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"centers", "cli", "errors", "labels", "loop", "redis", "triton"}
# public names, each with its other side: the wire, the client, the process
CLASSES = {"EmbeddedImages", "Item", "Job", "Jobs", "Model", "Parent", "Problem"}
CLASSES |= {"TritonPythonModel"}  # the name that the python backend of Triton asks of each model.py


def twice(places):
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def test_names_of_modules_and_classes_occur_once():
    modules, classes = defaultdict(set), defaultdict(set)
    for package in ("mlcd", "training", "service"):
        for path in (ROOT / package).rglob("*.py"):
            if not path.stem.startswith("__"):
                modules[path.stem].add(str(path.relative_to(ROOT)))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].add(str(path.relative_to(ROOT)))
    for allowed, found in ((MODULES, twice(modules)), (CLASSES, twice(classes))):
        assert set(found) == allowed, {name: found.get(name) for name in set(found) ^ allowed}
