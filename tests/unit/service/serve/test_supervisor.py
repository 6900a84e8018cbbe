"""A server process that cannot be started again costs the others nothing."""

import asyncio
import errno
import signal
import socket

import pytest

from mlcd.child import Child
from mlcd.service.serve import supervisor
from mlcd.service.serve.supervisor import Supervisor
from mlcd.service.settings import Settings


class Hanging:
    """A child that has been started and says nothing."""

    def __init__(self):
        self.signals = []

    def signal(self, number):
        self.signals.append(number)

    def send(self, message):
        pass

    async def receive(self):
        await asyncio.Event().wait()


def started_again(monkeypatch, tmp_path, start):
    async def scenario():
        with socket.socket() as listener:
            made = Supervisor(Settings(model="fake"), (None, None), listener, announce=print)
            return await made._restart(1, tmp_path, 0.0)

    monkeypatch.setattr(Child, "start", start)
    return asyncio.run(scenario())


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_machine_without_processes_or_memory_is_asked_again(monkeypatch, tmp_path, number):
    async def refused(*arguments, **options):
        raise OSError(number, "refused")

    assert started_again(monkeypatch, tmp_path, refused) is False


def test_one_that_hangs_while_it_opens_is_killed(monkeypatch, tmp_path):
    child = Hanging()

    async def start(*arguments, **options):
        return child

    monkeypatch.setattr(supervisor, "SERVER_OPEN_S", 0.1)
    monkeypatch.setattr(supervisor, "Order", dict_of)
    monkeypatch.setattr(supervisor, "asdict", dict)
    assert started_again(monkeypatch, tmp_path, start) is False
    assert child.signals == [signal.SIGKILL]


def dict_of(*fields):
    return dict(enumerate(fields))
