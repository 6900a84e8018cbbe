"""Fixtures of the job stores: one database after the other, opened as often as there are
processes.
"""

import contextlib

import pytest

from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from tests.unit.service.cached import redis_server


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(
        tmp_path_factory.mktemp("redis"), "--appendonly", "yes", "--appendfsync", "always"
    ) as running:
        yield running


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def where(request, tmp_path):
    """The settings that name one database."""
    settings = {"model": "hog", "state_dir": str(tmp_path)}
    if request.param == "redis":
        server = request.getfixturevalue("redis")
        server.ask("FLUSHALL")
        settings["redis_url"] = server.url
    return settings


@pytest.fixture
def opened(where, monkeypatch):
    """Opens a store on it, as another process would."""
    monkeypatch.setattr(
        "mlcd.service.jobs.transitions.FIRST_PAUSE_S", 0.0
    )  # a test that is about them sets its own
    with contextlib.ExitStack() as stack:

        def open_store():
            return stack.enter_context(contextlib.closing(open_queue(read_settings(where))))

        yield open_store


@pytest.fixture
def store(opened):
    return opened()
