"""A child for real: what it and its parent tell each other, and how it ends."""

import asyncio
import signal
import time
from subprocess import PIPE, Popen

import pytest

from mlcd.child import Child, child_command, to_line
from mlcd.errors import Conflict, MlcdError

CHILD = """
import os, signal, sys, time
from mlcd.child import serve_parent
from mlcd.errors import Conflict, MlcdError

class Rare(MlcdError):
    pass

def work(order, parent):
    print("a library speaks")
    parent.send({"of": order})
    for message in parent:
        match message["do"]:
            case "answer":
                parent.send({"of": message})
            case "refuse":
                raise Conflict("it is taken", remedy="take another")
            case "refuse rarely":
                raise Rare("it is rare")
            case "break off":
                os.write(parent._output.fileno(), b'{"of": ')
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60)

serve_parent(work)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "some_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "some_child"


def talk(module, conversation):
    async def scenario():
        child = await Child.start(module)
        try:
            child.send({"num": 1})
            assert await child.receive() == {"of": {"num": 1}}
            await conversation(child)
        finally:
            await child.end()

    asyncio.run(scenario())


def test_messages_go_both_ways_and_the_end_of_input_ends_the_child(module):
    async def conversation(child):
        for text in ("ü", "two\nlines"):
            child.send({"do": "answer", "text": text})
            assert await child.receive() == {"of": {"do": "answer", "text": text}}
        await child.end(patience_s=10)
        assert (await child.receive(), await child.wait()) == (None, 0)

    talk(module, conversation)


@pytest.mark.parametrize(
    ("order", "kind", "text"),
    [
        ("refuse", Conflict, "it is taken: take another"),
        ("refuse rarely", MlcdError, "it is rare"),
    ],
)
def test_an_error_of_the_child_is_raised_as_the_parents_own(module, order, kind, text):
    async def conversation(child):
        child.send({"do": order})
        with pytest.raises(MlcdError) as caught:
            await child.receive()
        assert (type(caught.value), str(caught.value)) == (kind, text)
        assert await child.wait() == 2

    talk(module, conversation)


def test_a_line_that_was_not_finished_is_no_message(module):
    async def conversation(child):
        child.send({"do": "break off"})
        assert (await child.receive(), await child.wait()) == (None, -signal.SIGKILL)

    talk(module, conversation)


def test_a_child_heeds_no_stop_signal_and_ends_by_force(module):
    async def conversation(child):
        child.send({"do": "hang"})
        for number in (signal.SIGTERM, signal.SIGINT):
            child.signal(number)
        started = time.monotonic()
        await child.end(patience_s=0.3)
        assert await child.wait() == -signal.SIGKILL
        assert 0.3 <= time.monotonic() - started < 10
        child.signal(signal.SIGTERM)  # nobody hears it

    talk(module, conversation)


def test_a_signal_before_the_child_can_ignore_it_does_not_end_it(module):
    async def scenario():
        child = await Child.start(module)
        child.signal(signal.SIGTERM)
        child.send({"num": 1})
        assert await child.receive() == {"of": {"num": 1}}
        await child.end(patience_s=10)

    asyncio.run(scenario())


def test_a_child_imports_nothing_from_the_working_directory(module, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path / "here")

    async def conversation(child):
        assert child.pid > 0

    talk(module, conversation)


def test_a_child_whose_parent_reads_no_more_ends_without_a_word(module):
    with Popen(child_command(module), stdin=PIPE, stdout=PIPE, stderr=PIPE) as child:
        child.stdout.close()
        child.stdin.write(to_line({"num": 1}))
        child.stdin.close()
        said = child.stderr.read()
    assert (said, child.returncode) == (b"a library speaks\n", 1)
