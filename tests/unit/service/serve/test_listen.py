import socket

import pytest

from mlcd.service.serve.cli import describe_address, listen
from mlcd.service.settings import Settings


def test_the_body_of_an_answer_does_not_wait_until_its_head_is_acknowledged():
    with (
        listen(Settings(model="hog", port=0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:{}"),
        ("0.0.0.0", "http://127.0.0.1:{} and every address of this machine"),
    ],
)
def test_the_address_that_is_told_opens_in_a_browser(host, address):
    with listen(Settings(model="hog", host=host, port=0)) as listener:
        assert describe_address(listener) == address.format(listener.getsockname()[1])
