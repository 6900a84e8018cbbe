"""The outgoing network: names are resolved once, and only checked addresses are connected to."""

import ssl
from collections.abc import Iterable
from typing import Any, Final

import httpcore
from httpcore import SOCKET_OPTION, AsyncNetworkBackend, AsyncNetworkStream

from mlcd.fetching.addresses import Network, may_connect
from mlcd.fetching.fetch_refusals import host_refused
from mlcd.fetching.resolver import Resolver
from mlcd.too_many_files import lacks_open_files, too_many_files

_CONNECT_S: Final = 3.0  # for one address of several: the next may answer
_READ_BYTES: Final = 16 * 2**10  # parsed at a time, on the event loop
# Headers and framing of one answer: each of these bytes costs more than one of the image.
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

        Raises the same ImageRejected where an address is forbidden and where the name has none.
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
            if lacks_open_files():  # of which the system's resolver does not tell
                raise too_many_files() from None
            addresses = []
        if not addresses:
            raise host_refused(f"{host} cannot be resolved to an address")
        if not all(may_connect(address, self._networks) for address in addresses):
            raise host_refused(f"{host} has an address that is not public")
        return addresses


class MeteredStream(AsyncNetworkStream):
    """A connection that fails when an answer is more framing than image.

    The reader of the body calls `accounted` for every chunk.
    """

    def __init__(self, stream: AsyncNetworkStream) -> None:
        self._stream = stream
        self._overhead = 0

    def account(self, num: int) -> None:
        """Notes that `num` of the bytes were the body's."""
        self._overhead -= num

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        if self._overhead > _MAX_OVERHEAD_BYTES:
            raise httpcore.ReadError
        data = await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        self._overhead += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._overhead = 0  # a new request, and so a new answer
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
