import socket

from service.serve.cli import listen
from service.settings import Settings


def test_the_body_of_an_answer_does_not_wait_until_its_head_is_acknowledged():
    with (
        listen(Settings(model="hog", port=0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
