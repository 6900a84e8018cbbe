"""Requests for the labels of one image each, sent as one request, which costs less CPU time."""

from collections.abc import Sequence
from typing import Final
from uuid import uuid4

import orjson

from mlcd.service.jobs.batch_inputs import JSON

JOINED_ENDPOINT: Final = "/v1/labels"
MAX_JOINED: Final = 8  # requests
MAX_JOINED_BYTES: Final = (
    2**20
)  # of their bodies; larger images take so long that nothing is gained
_START, _END = b'{"images":[', b"]}"


def join_bodies(media_type: str, bodies: Sequence[bytes]) -> tuple[str, bytes]:
    """Returns the media type and the body of a request with the images of all bodies."""
    if media_type == JSON:
        images = (body[len(_START) : -len(_END)] for body in bodies)
        return JSON, _START + b",".join(images) + _END
    boundary = uuid4().hex
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="image"\r\n\r\n'
    ).encode()
    parts = b"".join(head + body + b"\r\n" for body in bodies)
    return f"multipart/form-data; boundary={boundary}", parts + f"--{boundary}--\r\n".encode()


def split_answer(answer: bytes | bytearray, num: int) -> list[bytes | None]:
    """Returns, for each of `num` images, the bytes that its request would be answered with alone;
    None for an image with an error, which may be due to the others.
    """
    content = orjson.loads(answer)
    answers: list[bytes | None] = [None] * num
    for result in content["results"]:
        row = result["index"]
        answers[row] = orjson.dumps({**content, "errors": [], "results": [{**result, "index": 0}]})
    return answers
