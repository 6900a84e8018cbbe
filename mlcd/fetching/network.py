"""The outgoing network: resolves each name once and connects only to checked addresses."""

import ssl
from collections.abc import Iterable
from typing import Any, Final

import httpcore
from httpcore import SOCKET_OPTION, AsyncNetworkBackend, AsyncNetworkStream

from mlcd.fetching.addresses import Network, may_connect
from mlcd.fetching.fetch_refusals import host_refused
from mlcd.fetching.resolver import Resolver
from mlcd.too_many_files import lacks_open_files, too_many_files

_CONNECT_S: Final = 3.0  # per address: the host's next address may answer
_READ_BYTES: Final = 16 * 2**10  # bytes parsed at a time, on the event loop
# Limit on header and framing bytes per response: parsing one is slower than copying a body byte.
_MAX_OVERHEAD_BYTES: Final = 64 * 2**10


class CheckedNetwork(AsyncNetworkBackend):
    """A network that connects only to hosts whose every address is public or in `networks`.

    It connects to the checked address, not to the name.
    """

    def __init__(self, networks: tuple[Network, ...], resolver: Resolver) -> None:
        self._networks, self._resolver = networks, resolver
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's interface
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """Connects to the first address that answers.

        Raises the same ImageRejected whether an address is forbidden or the name does not resolve.
        """
        failure: Exception = httpcore.ConnectError()
        for address in await self._addresses(host, port):
            try:
                stream = await self._backend.connect_tcp(
                    address, port, timeout or _CONNECT_S, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return MeteredStream(stream)
        raise failure

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            addresses = await self._resolver.addresses(host, port)
        except (OSError, UnicodeError):
            if lacks_open_files():  # getaddrinfo does not report this cause
                raise too_many_files() from None
            addresses = []
        if not addresses:
            raise host_refused(f"{host} cannot be resolved to an address")
        if not all(may_connect(address, self._networks) for address in addresses):
            raise host_refused(f"{host} has an address that is not public")
        return addresses


class MeteredStream(AsyncNetworkStream):
    """A connection that fails if the framing of a response exceeds `_MAX_OVERHEAD_BYTES`.

    The code that reads the body must call `subtract_body_bytes` for every chunk.
    """

    def __init__(self, stream: AsyncNetworkStream) -> None:
        self._stream = stream
        self._overhead = 0

    def subtract_body_bytes(self, num: int) -> None:
        """Subtracts `num` body bytes from the overhead: `read` counts every byte as overhead."""
        self._overhead -= num

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        if self._overhead > _MAX_OVERHEAD_BYTES:
            raise httpcore.ReadError
        data = await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        self._overhead += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._overhead = 0  # a new request starts a new response
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncNetworkStream:
        return MeteredStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
