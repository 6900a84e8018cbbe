"""What users hold on to changes only where somebody means it: names, commands and routes are written down."""

import subprocess
import sys

import pytest

from tests.public.snapshots import FOLDER, SNAPSHOTS


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_public_surface_is_the_one_that_is_written_down(name):
    written = (FOLDER / name).read_text()
    assert SNAPSHOTS[name]() == written, (
        "meant? say so in CHANGELOG.md and run `python tests/public/snapshots.py`"
    )


def test_importing_the_package_opens_nothing_heavy():
    heavy = "{'numpy', 'torch', 'pyarrow', 'openvino', 'faiss'}"
    code = f"import sys, mlcd; dir(mlcd); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_there_is_not_is_an_attribute_error():
    import mlcd

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mlcd.nothing
