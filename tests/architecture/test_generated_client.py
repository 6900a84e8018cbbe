"""The synchronous client is what `make client` writes from the asynchronous one."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "mlcd" / "client"


@pytest.fixture(scope="module")
def synchronous():
    return runpy.run_path(str(ROOT / "generate_client.py"))["synchronous"]


def test_the_synchronous_client_is_current(synchronous):
    written = synchronous((CLIENT / "asynchronous.py").read_text())
    assert (CLIENT / "synchronous.py").read_text() == written, "run `make client`"


def test_a_change_of_the_asynchronous_client_is_noticed(synchronous):
    source = (CLIENT / "asynchronous.py").read_text()
    changed = source.replace("num: int = 60", "num: int = 61")
    assert synchronous(changed) != synchronous(source)
