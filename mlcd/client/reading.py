"""The reading of answers from their wire formats. Unknown fields are ignored, because a newer
server has more.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import datetime
from typing import Any, Final, TypeVar

import httpx
import numpy as np

from mlcd.client.answers import (
    Answer,
    Center,
    CenterSet,
    Collection,
    Example,
    FailedShard,
    Info,
    Item,
    Job,
    JobFailure,
    JobProgress,
    Label,
    Match,
    Origin,
    Row,
)
from mlcd.client.problems import not_our_api
from mlcd.errors import ImageRejected

_Value = TypeVar("_Value")
_FLOAT: Final = np.dtype("<f4")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise not_our_api() from error


@_translated()
def read_rows(response: httpx.Response, num: int) -> Answer[Row]:
    """Reads an octet-stream of `num` rows of little-endian float32."""
    dimension = int(response.headers["x-mlcd-dimension"])
    rows = np.frombuffer(response.content, _FLOAT).reshape(num, dimension).astype(np.float32)
    return Answer(list(rows), _origin(response))


def read_embedded(response: httpx.Response, num: int) -> Answer[Row]:
    """Reads JSON with a row or an error for each of `num` images."""
    return _placed(response, num, lambda result: np.asarray(result["embedding"], np.float32))


def read_labeled(response: httpx.Response, num: int) -> Answer[list[Label]]:
    return _placed(response, num, lambda result: [_label(label) for label in result["labels"]])


def read_found(response: httpx.Response, num: int) -> Answer[list[Match]]:
    return _placed(
        response, num, lambda result: [_known(Match, match) for match in result["matches"]]
    )


def read_added(response: httpx.Response, num: int) -> Answer[str]:
    return _placed(response, num, lambda result: str(result["outcome"]))


@_translated()
def read_collection(response: httpx.Response) -> Collection:
    return _known(Collection, response.json())


@_translated()
def read_collections(response: httpx.Response) -> list[Collection]:
    return [_known(Collection, one) for one in response.json()["collections"]]


@_translated()
def read_item(response: httpx.Response) -> Item:
    content = response.json()
    return _known(Item, content | {"embedding": np.asarray(content["embedding"], np.float32)})


@_translated()
def read_groups(response: httpx.Response) -> list[list[str]]:
    return [group["ids"] for group in response.json()["groups"]]


@_translated()
def read_center(response: httpx.Response) -> Center:
    content = response.json()
    nearest = [_label(label) for label in content["nearest"]]
    examples = [_known(Example, example) for example in content["examples"]]
    return Center(
        content["id"], content["size"], content["name"], nearest, examples, _origin(response)
    )


@_translated()
def read_info(response: httpx.Response) -> Info:
    content = response.json()
    centers = content["centers"]
    return _known(
        Info, content | {"centers": None if centers is None else _known(CenterSet, centers)}
    )


@_translated()
def read_job(text: str) -> Job:
    return _job(json.loads(text))


@_translated()
def read_jobs(response: httpx.Response) -> tuple[list[Job], str | None]:
    """One page, and the cursor of the next one."""
    content = response.json()
    return [_job(job) for job in content["jobs"]], content["cursor"]


@_translated()
def read_failures(response: httpx.Response) -> tuple[list[FailedShard], int | None]:
    """One page, and the cursor of the next one."""
    content = response.json()
    shards = [
        _known(FailedShard, shard | {"problem": _failure(shard["problem"])})
        for shard in content["failures"]
    ]
    return shards, content["cursor"]


@_translated()
def _placed(response: httpx.Response, num: int, read: Callable[[Any], _Value]) -> Answer[_Value]:
    """Puts each result and error at its index; every index must have one."""
    content = response.json()
    items: dict[int, _Value | ImageRejected] = {
        result["index"]: read(result) for result in content["results"]
    }
    items |= {
        error["index"]: ImageRejected(error["type"], error["detail"]) for error in content["errors"]
    }
    return Answer(
        [items[index] for index in range(num)], _origin(response, audit=content.get("audit"))
    )


def _label(content: dict[str, Any]) -> Label:
    examples = [_known(Example, example) for example in content.get("examples") or []]
    return _known(Label, content | {"examples": examples})


def _job(content: dict[str, Any]) -> Job:
    times = {name: _time(content[name]) for name in ("created", "started", "ended")}
    progress = _known(JobProgress, content["progress"])
    return _known(
        Job, content | times | {"progress": progress, "problem": _failure(content["problem"])}
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _failure(content: dict[str, Any] | None) -> JobFailure | None:
    return None if content is None else _known(JobFailure, content)


def _known(cls: type[_Value], content: dict[str, Any]) -> _Value:
    known = {field.name: content[field.name] for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**known)


def _origin(response: httpx.Response, audit: dict[str, Any] | None = None) -> Origin:
    said = response.headers
    return Origin(
        model=said["x-mlcd-model"],
        fingerprint=said["x-mlcd-fingerprint"],
        preprocess_version=int(said["x-mlcd-preprocess-version"]),
        centers=said.get("x-mlcd-centers"),
        audit=audit,
        rounded=said.get("x-mlcd-rounded"),
    )
