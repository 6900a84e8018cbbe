"""The HTTP client of an encoder behind an endpoint: posts JSON, and retries while it is away."""

import json
import logging
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import httpcore

from mlcd.backoff import Backoff, read_retry_after
from mlcd.encoders.endpoint_forms import EndpointAddress
from mlcd.errors import ConfigInvalid, InvalidInput, MlcdError, Unavailable
from mlcd.fetching.addresses import may_connect
from mlcd.too_many_files import refuse_too_many_files
from mlcd.version import __version__

_log = logging.getLogger("mlcd.encoders")

KEY: Final = "MLCD_ENDPOINT_KEY"
KEY_FILE: Final = "MLCD_ENDPOINT_KEY_FILE"

_KEY: Final = re.compile(r"[!-~]{1,8192}")
_MAX_KEY_FILE_BYTES: Final = 16_384
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 60.0  # for one answer: a request of 16 images takes a large model seconds
_POLL_S: Final = 0.2  # interval at which a read checks whether the client has closed
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 8.0
_JITTER_S: Final = 2.0
_OK: Final = 200
_TOO_MANY: Final = 429
_AWAY: Final = (502, 503, 504)
# of one item that the model cannot embed, such as a damaged image or an empty text
_REJECTED: Final = (400, 413, 415, 422)
_MAX_DETAIL_BYTES: Final = 65_536
_MAX_DETAIL_CHARS: Final = 300
# Addresses that are not public. Without TLS, an endpoint may have no other: everyone on the way
# could read the key and change the embeddings.
_PRIVATE: Final = tuple(
    ip_network(block)
    for block in (
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "fc00::/7",
    )
)


class ItemsRejected(InvalidInput):
    """The endpoint refuses the items of a request; it may accept some of them."""


class _Away(Exception):
    """The endpoint cannot answer now.

    outage: whether another server may be there afterwards. pause_s: seconds that it asks to wait.
    """

    def __init__(self, reason: str, *, outage: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.outage, self.pause_s = outage, pause_s


class EndpointClient:
    """A client of one endpoint. Several threads may call it.

    outages: number of times that the endpoint was away.
    """

    def __init__(self, address: EndpointAddress, *, wait_s: float, first_wait_s: float) -> None:
        """wait_s: seconds after which a request to an endpoint that is away fails; `first_wait_s`
        until its first answer. Raises ConfigInvalid for a bad key.
        """
        self.outages = 0
        self._address, self._wait_s, self._first_wait_s = address, wait_s, first_wait_s
        self._has_answered, self._warned_at = False, -math.inf
        self._key = _read_key(os.environ)  # noqa: TID251 - command lines show keys
        self._closed = threading.Event()
        # No proxy, password or certificate of the environment is used, and no redirect followed.
        self._pool = httpcore.ConnectionPool(
            httpcore.default_ssl_context() if address.scheme == "https" else None,
            max_connections=address.parallel,
            network_backend=_CheckedNetwork(self._closed, is_plain=address.scheme == "http"),
        )

    def post(self, path: str, body: Mapping[str, Any], *, max_bytes: int) -> Any:
        """Posts JSON to a path below the endpoint's, and returns the JSON of the answer.

        max_bytes: largest body of an answer. Raises Unavailable if the endpoint stays away for
        `wait_s` or answers otherwise than with JSON, ItemsRejected if it refuses the items, and
        ConfigInvalid for other refusals.
        """
        content = json.dumps(body).encode()
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter_s=_JITTER_S)
        away_since: float | None = None
        while True:
            if self._closed.is_set():
                raise Unavailable("the encoder is closed")
            try:
                return self._post_once(path, content, max_bytes)
            except _Away as away:
                if self._closed.is_set():
                    raise Unavailable("the encoder is closed") from away
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if away.outage:
                    self.outages += 1
                wait_s = self._wait_s if self._has_answered else self._first_wait_s
                pause_s = backoff.next_s(at_least=away.pause_s)
                if now + pause_s - away_since > wait_s:
                    raise Unavailable(
                        f"{self} {away}, and has not recovered within {wait_s:g} s",
                        remedy="repeat the command when it is back: finished work stays",
                    ) from away
                # once for all threads
                if now - self._warned_at > wait_s:
                    self._warned_at = now
                    _log.warning("%s %s: trying again for up to %g s", self, away, wait_s)
                self._closed.wait(pause_s)

    def close(self) -> None:
        """Closes the connections, and ends waits for the endpoint and for answers."""
        self._closed.set()
        self._pool.close()

    def __repr__(self) -> str:
        return f"<client of {self._address}>"

    def __str__(self) -> str:
        return f"the endpoint {self._address}"

    def _post_once(self, path: str, content: bytes, max_bytes: int) -> Any:
        started = time.monotonic()
        try:
            with self._pool.stream(
                "POST",
                self._make_target(path),
                headers=self._make_headers(len(content)),
                content=content,
                extensions={
                    "timeout": {"connect": _CONNECT_S, "read": _ANSWER_S, "write": _ANSWER_S}
                },
            ) as response:
                raw = self._read(response, max_bytes, end=started + _ANSWER_S)
        except (MlcdError, _Away):
            raise
        # The libraries raise many kinds of errors for what a server may send or break off.
        except Exception as error:
            refuse_too_many_files(error)
            if _is_untrusted(error):
                raise ConfigInvalid(
                    f"{self} must have a valid certificate", remedy="name its CA with SSL_CERT_FILE"
                ) from error
            raise _Away(f"cannot be reached ({type(error).__name__})") from error
        self._has_answered = True
        if response.status != _OK:
            raise self._explain_refusal(response, raw)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Unavailable(
                f"{self} answers with something other than JSON", remedy="check the URL's path"
            ) from error

    def _read(self, response: httpcore.Response, max_bytes: int, *, end: float) -> bytes:
        """Returns the body, of a refusal only its beginning. end: latest time, monotonic."""
        is_success, raw = response.status == _OK, bytearray()
        for chunk in response.iter_stream():
            raw += chunk
            if is_success and len(raw) > max_bytes:
                raise Unavailable(f"{self} answers with more than {max_bytes} bytes")
            if not is_success and len(raw) > _MAX_DETAIL_BYTES:
                break
            if time.monotonic() > end:
                raise _Away(f"did not finish an answer within {_ANSWER_S:g} s")
        return bytes(raw)

    def _make_target(self, path: str) -> httpcore.URL:
        return httpcore.URL(
            scheme=self._address.scheme.encode(),
            host=self._address.host.encode(),
            port=self._address.port,
            target=f"{self._address.path}{path}".encode(),
        )

    def _make_headers(self, num_bytes: int) -> list[tuple[bytes, bytes]]:
        address = self._address
        host = f"[{address.host}]" if ":" in address.host else address.host
        is_default = address.port == (443 if address.scheme == "https" else 80)
        headers = {
            "Host": host if is_default else f"{host}:{address.port}",
            "User-Agent": f"mlcd/{__version__}",
            "Content-Type": "application/json",
            "Content-Length": str(num_bytes),
            "Accept": "application/json",
            "Accept-Encoding": "identity",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    def _explain_refusal(self, response: httpcore.Response, raw: bytes) -> Exception:
        """Returns the error of an answer that is not a success."""
        status = response.status
        if status == _TOO_MANY or status in _AWAY:
            fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            pause_s = read_retry_after(fields.get(b"retry-after")) or 0.0
            return _Away(f"answers {status}", outage=status in _AWAY, pause_s=pause_s)
        detail = self._hide_key(_read_detail(raw))
        message = f"{self} answers {status}" + (f" ({detail})" if detail else "")
        if status in _REJECTED:
            return ItemsRejected(message)
        if status in (401, 403):
            return ConfigInvalid(message, remedy=f"set {KEY}, or {KEY_FILE}, to a valid key")
        if 300 <= status < 400:
            return ConfigInvalid(message, remedy="give the URL that it redirects to")
        if 400 <= status < 500:
            return ConfigInvalid(message, remedy="check the URL and the name of the model")
        return Unavailable(message, remedy="see the endpoint's log")

    def _hide_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "…")


class _CheckedNetwork(httpcore.NetworkBackend):
    """A network that connects only to addresses that an endpoint may have.

    Never to link-local ones, such as a cloud's metadata; without TLS, not to public ones.
    """

    def __init__(self, closed: threading.Event, *, is_plain: bool) -> None:
        self._closed, self._is_plain = closed, is_plain
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Connects to the first address that answers. Raises ConfigInvalid for a forbidden one."""
        listed = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(info[4][0]) for info in listed)
        for address in addresses:
            self._check(host, address)
        failure: Exception = httpcore.ConnectError()
        for address in addresses:
            try:
                stream = self._backend.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _ClosableStream(stream, self._closed)
        raise failure

    def _check(self, host: str, text: str) -> None:
        if not may_connect(text, _PRIVATE):
            raise ConfigInvalid(
                f"the endpoint's host {host} has the address {text}, which no endpoint may have"
            )
        if self._is_plain and not any(ip_address(text) in block for block in _PRIVATE):
            raise ConfigInvalid(
                f"an endpoint with http must have a private address, got {text} of {host}",
                remedy="use https",
            )


class _ClosableStream(httpcore.NetworkStream):
    """A connection whose reads end when the client closes: closing a socket does not end a read of
    another thread, and the process would wait for that thread after Ctrl-C.
    """

    def __init__(self, stream: httpcore.NetworkStream, closed: threading.Event) -> None:
        self._stream, self._closed = stream, closed

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        end = time.monotonic() + (_ANSWER_S if timeout is None else timeout)
        while not self._closed.is_set():
            try:
                return self._stream.read(max_bytes, _POLL_S)
            except httpcore.ReadTimeout:
                if time.monotonic() >= end:
                    raise
        raise httpcore.ReadError

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _ClosableStream(stream, self._closed)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _read_key(environment: Mapping[str, str]) -> str | None:
    """Returns the key for the endpoint, None without one.

    Raises ConfigInvalid for a key or a file that cannot be used; the message does not repeat it.
    """
    key, file = environment.get(KEY), environment.get(KEY_FILE)
    if key and file:
        raise ConfigInvalid(f"{KEY} and {KEY_FILE} are both set", remedy="set one of them")
    if file:
        try:
            with Path(file).open(encoding="utf-8") as text:
                key = text.read(_MAX_KEY_FILE_BYTES).strip()
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"{KEY_FILE} must name a readable file, got {file}") from error
        if not key:
            raise ConfigInvalid(f"{KEY_FILE} must name a file with a key, got an empty one")
    if not key:
        return None
    if not _KEY.fullmatch(key):
        raise ConfigInvalid(f"the key of {KEY} must be printable ASCII without spaces")
    return key


def _is_untrusted(error: BaseException | None) -> bool:
    """Tells whether a server's certificate is the cause of an error."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _read_detail(raw: bytes) -> str:
    """Returns the message in the JSON or the text of a refusal, in one line."""
    text = raw.decode(errors="replace")
    try:
        detail = json.loads(text)
        if isinstance(detail, dict):
            detail = detail.get("error", detail)
        if isinstance(detail, dict):
            names = ("message", "detail", "error")
            detail = next((detail[name] for name in names if name in detail), "")
        text = detail if isinstance(detail, str) else json.dumps(detail)
    except (ValueError, RecursionError):
        pass
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MAX_DETAIL_CHARS else f"{line[:_MAX_DETAIL_CHARS]}…"
