"""Where fuzzing begins: valid inputs of each target, and hostile images."""

import base64
import functools
import json
import struct

from tests import hostile


@functools.cache
def seeds(target):
    """Inputs of `target`, as bytes."""
    images = [
        data
        for make in (hostile.shapes, hostile.polyglots)
        for _, data in make()
        if len(data) < 20_000
    ]
    png = hostile.encoded(hostile.picture().resize((4, 4)))
    uri = b"data:image/png;base64," + base64.b64encode(png)
    tensor = struct.pack("<I", len(png)) + png
    head = {
        "name": "image",
        "shape": [1],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(tensor)},
    }
    infer = json.dumps(
        {"inputs": [head], "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}
    )
    pixels = {
        "inputs": [
            {"name": "image_u8", "shape": [1, 3, 1, 1], "datatype": "UINT8", "data": [1, 2, 3]}
        ]
    }
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    openai = {
        "model": "fake:latency_ms=0",
        "input": [uri.decode()],
        "encoding_format": "base64",
        "dimensions": 2,
    }
    cohere = {
        "model": "fake:latency_ms=0",
        "images": [uri.decode()],
        "embedding_types": ["int8", "ubinary"],
    }
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri.decode()}}]}
    ]
    return {
        "decoder": images,
        "data-uri": [
            uri,
            b"data:,",
            b"http://a/b",
            b"DATA:image/jpeg;charset=x;base64,AAAA",
            base64.b64encode(png),
        ],
        "multipart": [
            b"; boundary=x\n" + part + png + b"\r\n" + part + b"\r\n--x--\r\n",
            b'; boundary="x y"\n--x y--',
        ],
        "kserve": [
            f"{len(infer)}\n{infer}".encode() + tensor,
            b"0\n" + png,
            b"\n" + infer.encode(),
        ],
        "json": [
            json.dumps(body).encode()
            for body in (
                openai,
                cohere,
                pixels,
                {"model": "fake:latency_ms=0", "messages": messages},
            )
        ],
    }[target]
