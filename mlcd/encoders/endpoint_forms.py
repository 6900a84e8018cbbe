"""The address of an encoder behind an endpoint, and the bodies of its requests and answers.

DIALECT+https://HOST/PATH[?size=336&batch=16&parallel=4&wait=600]#NAME
"""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid

ItemKind = Literal["image", "text"]

_SCHEME: Final = re.compile(r"([a-z]+)\+(https?://.*)", re.DOTALL)
_NAME: Final = re.compile(r"[!->@-~]{1,128}")
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]+")
_PATH: Final = re.compile(r"[!-~]*")
# default and limits of each field of the query
_FIELDS: Final = {
    "size": (336, 16, 2048),
    "batch": (16, 1, 256),
    "parallel": (4, 1, 64),
    "wait": (600, 0, 86_400),
}
_REMEDY: Final = "write openai+https://HOST/v1#NAME"


class AnswerMalformed(Exception):
    """The answer is not one row of numbers for each item. The text says what it is instead."""


@dataclass(frozen=True)
class WireForm:
    """The form in which a kind of server takes items and answers with rows.

    path: added to the endpoint's path. max_items: items per request. image_body, text_body: the
    body of a request, from the model's name and the data-URIs or texts. read: returns the rows of
    an answer, in order, each as numbers or as base64 of little-endian float32.
    """

    path: str
    max_items: int
    image_body: Callable[[str, Sequence[str]], dict[str, Any]]
    text_body: Callable[[str, Sequence[str]], dict[str, Any]]
    read: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class EndpointAddress:
    """The address of a model behind an endpoint.

    dialect: key of DIALECTS. name: name of the model, as the endpoint knows it. size: side in
    pixels of the images to send. batch: items per request. parallel: concurrent requests. wait_s:
    seconds to wait for an endpoint that is away.
    """

    dialect: str
    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str
    name: str
    size: int
    batch: int
    parallel: int
    wait_s: float

    @classmethod
    def parse(cls, spec: str) -> Self:
        """Reads the address. Raises ConfigInvalid, without repeating a password in it."""
        match = _SCHEME.fullmatch(spec)
        if match is None or match[1] not in DIALECTS:
            raise ConfigInvalid(
                f"an endpoint must be DIALECT+https://…, DIALECT one of {', '.join(DIALECTS)}",
                remedy=_REMEDY,
            )
        try:
            parts = urlsplit(match[2])
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigInvalid("the endpoint's host or port is invalid", remedy=_REMEDY) from error
        if "@" in parts.netloc:
            raise ConfigInvalid(
                "the endpoint's URL must not contain a user or a password",
                remedy="set MLCD_ENDPOINT_KEY, or MLCD_ENDPOINT_KEY_FILE",
            )
        if not _HOST.fullmatch(host) or not _PATH.fullmatch(parts.path):
            raise ConfigInvalid(
                f"the endpoint's host and path must be ASCII, got {host or 'no host'}",
                remedy="write a host in punycode, and other characters as %XX",
            )
        name = unquote(parts.fragment)
        if not _NAME.fullmatch(name):
            raise ConfigInvalid(
                "an endpoint needs the name of its model after #, of 1 to 128 printable ASCII"
                f" characters without spaces and ?, got {len(name)}",
                remedy=f"{_REMEDY}, a query before #",
            )
        size, batch, parallel, wait_s = _read_fields(parts).values()
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return cls(
            dialect=match[1],
            scheme=scheme,
            host=host,
            port=port or (443 if scheme == "https" else 80),
            path=parts.path.rstrip("/"),
            name=name,
            size=size,
            batch=batch,
            parallel=parallel,
            wait_s=float(wait_s),
        )

    def __str__(self) -> str:
        """Returns the address with the fields that determine the embeddings."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = f"{self.dialect}+{self.scheme}://{host}:{self.port}{self.path}"
        return f"{place}?size={self.size}#{self.name}"


def is_endpoint(spec: str) -> bool:
    """Returns whether a model's spec is the address of an endpoint, valid or not."""
    return _SCHEME.fullmatch(spec) is not None


def to_data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def read_rows(dialect: WireForm, answer: Any, num: int) -> NDArray[np.float32]:
    """Returns the rows of an answer to `num` items, [num, D] float32; they may be not finite.

    Raises AnswerMalformed.
    """
    try:
        raw_rows = dialect.read(answer)
        rows = [_read_row(row) for row in raw_rows]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise AnswerMalformed("something other than embeddings") from error
    if len(rows) != num:
        raise AnswerMalformed(f"{len(rows)} embeddings for {num} inputs")
    if any(row.ndim != 1 or len(row) != len(rows[0]) or not len(row) for row in rows):
        raise AnswerMalformed("embeddings of several shapes")
    return np.stack(rows)


def _read_row(row: Any) -> NDArray[np.float32]:
    if isinstance(row, str):
        try:
            return np.frombuffer(base64.b64decode(row, validate=True), "<f4").astype(np.float32)
        except binascii.Error as error:
            raise ValueError from error
    if not isinstance(row, list) or not all(isinstance(number, int | float) for number in row):
        raise TypeError
    with np.errstate(over="ignore"):
        return np.array(row, np.float64).astype(np.float32)


def _read_fields(parts: SplitResult) -> dict[str, int]:
    values = {name: default for name, (default, _, _) in _FIELDS.items()}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _FIELDS:
            # The name is not repeated: a key in the URL would end up in a log.
            raise ConfigInvalid(
                f"the query of an endpoint may have {', '.join(_FIELDS)}, got another name",
                remedy="set a key as MLCD_ENDPOINT_KEY",
            )
        _, least, most = _FIELDS[name]
        if not text.isascii() or not text.isdecimal() or not least <= int(text[:9]) <= most:
            raise ConfigInvalid(
                f"{name} of an endpoint must be an integer from {least} to {most}, got {text[:20]}"
            )
        values[name] = int(text)
    return values


def _read_listed(answer: Any) -> list[Any]:
    """Returns the rows of OpenAI's and Jina's list, ordered by their index."""
    entries = answer["data"]
    if sorted(entry["index"] for entry in entries) != list(range(len(entries))):
        raise ValueError
    return [entry["embedding"] for entry in sorted(entries, key=lambda entry: entry["index"])]


def _read_cohere(answer: Any) -> Any:
    rows = answer["embeddings"]
    return rows["float"] if isinstance(rows, dict) else rows  # version 1 answers a list


def _make_message(name: str, part: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "user", "content": [part]}
    return {"model": name, "messages": [message], "encoding_format": "base64"}


DIALECTS: Final = {
    # With `modality`, as Infinity, NIM and mlcd take it.
    "openai": WireForm(
        "/embeddings",
        256,
        lambda name, uris: {
            "model": name,
            "input": [*uris],
            "modality": "image",
            "encoding_format": "base64",
        },
        lambda name, texts: {
            "model": name,
            "input": [*texts],
            "modality": "text",
            "encoding_format": "base64",
        },
        _read_listed,
    ),
    # Texts as messages, too: the model's chat template must apply to both or to neither.
    "vllm": WireForm(
        "/embeddings",
        1,
        lambda name, uris: _make_message(
            name, {"type": "image_url", "image_url": {"url": uris[0]}}
        ),
        lambda name, texts: _make_message(name, {"type": "text", "text": texts[0]}),
        _read_listed,
    ),
    "tei": WireForm(
        "/embed",
        256,
        lambda _, uris: {"inputs": [*uris], "truncate": True},
        lambda _, texts: {"inputs": [*texts], "truncate": True},
        lambda answer: answer,
    ),
    "cohere": WireForm(
        "/embed",
        96,
        lambda name, uris: {
            "model": name,
            "images": [*uris],
            "input_type": "image",
            "embedding_types": ["float"],
        },
        lambda name, texts: {
            "model": name,
            "texts": [*texts],
            "input_type": "search_query",
            "embedding_types": ["float"],
        },
        _read_cohere,
    ),
    "jina": WireForm(
        "/embeddings",
        256,
        lambda name, uris: {
            "model": name,
            "input": [{"image": uri.partition(",")[2]} for uri in uris],
            "embedding_type": "base64",
        },
        lambda name, texts: {
            "model": name,
            "input": [{"text": text} for text in texts],
            "embedding_type": "base64",
        },
        _read_listed,
    ),
}
