"""A primary Redis and its replica, and a name that leads to one of them."""

import contextlib
import select
import socket
import socketserver
import threading

from tests.integration.running import until
from tests.unit.service.cached import redis_server


class _Connection(socketserver.BaseRequestHandler):
    """Passes on what both sides send, until one of them ends."""

    def handle(self):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.server.target.port)) as upstream,
        ):
            sinks = {self.request: upstream, upstream: self.request}
            while True:
                for source in select.select(list(sinks), [], [])[0]:
                    if not (data := source.recv(65536)):
                        return
                    sinks[source].sendall(data)


class ServiceName(socketserver.ThreadingTCPServer):
    """A proxy that leads new connections to the server of the moment; those that are open stay."""

    daemon_threads = True

    def __init__(self, server):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target, self.url = server, f"redis://127.0.0.1:{self.server_address[1]}/0"


@contextlib.contextmanager
def service_name(server):
    with ServiceName(server) as name:
        serving_name = threading.Thread(target=name.serve_forever)
        serving_name.start()
        try:
            yield name
        finally:
            name.shutdown()
            serving_name.join()


def role(server):
    return server.ask("ROLE").split(b"\r\n")[2]


def replicate(replica, primary):
    replica.ask("REPLICAOF", "127.0.0.1", str(primary.port))
    until(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"), 60)


@contextlib.contextmanager
def redis_pair(folder):
    """A primary and its replica."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            servers.append(
                stack.enter_context(redis_server(folder / name, "--repl-diskless-sync-delay", "0"))
            )
        replicate(servers[1], servers[0])
        yield servers


def fail_over(primary, replica):
    """Redis's own command: nothing is lost, and no connection ends."""
    assert primary.ask("FAILOVER") == b"+OK\r\n"
    until(lambda: (role(primary), role(replica)) == (b"slave", b"master"), 60)
