"""The names of classes: each occurs once, but for those that every side of an interface has."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# public names, each with its other side: the wire, the client, the process
CLASSES = {"EmbeddedImages", "Item", "Job", "Jobs", "Model", "Parent", "Problem"}
CLASSES |= {"TritonPythonModel"}  # the name that the python backend of Triton asks of each model.py


def test_names_of_classes_occur_once():
    classes = defaultdict(set)
    for package in ("mlcd", "training", "service"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].add(str(path.relative_to(ROOT)))
    repeated = {name: sorted(paths) for name, paths in classes.items() if len(paths) > 1}
    assert set(repeated) == CLASSES, {name: repeated.get(name) for name in set(repeated) ^ CLASSES}
