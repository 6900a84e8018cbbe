"""The fuzzing targets under Hypothesis: any bytes, and bytes that look right for a while. `make fuzz` goes on from here."""

import json
import struct

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz import targets
from tests.fuzz.seeds import seeds

few = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
many = settings(few, max_examples=300)


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    if targets.service.cache_info().currsize:
        targets.service().__exit__(None, None, None)
        targets.service.cache_clear()


@st.composite
def damaged(draw, target):
    """A valid input, cut, overwritten, or with something put in."""
    data = bytearray(draw(st.sampled_from(seeds(target))))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        removed = draw(st.sampled_from([0, 1, 2, 4, 16, 10_000]))
        data[place : place + removed] = draw(st.binary(max_size=8))
    return bytes(data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_valid_inputs_are_taken(name):
    for seed in seeds(name):
        targets.TARGETS[name](seed)


@many
@given(st.one_of(st.binary(max_size=200), damaged("decoder")))
def test_any_bytes_are_a_picture_within_the_limits_or_rejected(data):
    targets.decoder(data)


@many
@given(st.one_of(st.text().map(str.encode), damaged("data-uri")))
@example(b"data:image/png;base64,====")
@example("data:image/png;base64,\ud7ff".encode())
def test_any_text_is_an_image_or_rejected(data):
    targets.data_uri(data)


boundaries = st.one_of(
    st.just(b"; boundary=x"),
    st.binary(max_size=80).map(lambda data: b"; boundary=" + data),
    st.binary(),
)
part_headers = st.one_of(
    st.just(b'Content-Disposition: form-data; name="files"; filename="a.png"\r\n'),
    st.just(b"Content-Disposition: form-data; name*=utf-8''%ff; filename*=x''%00\r\n"),
    st.just(b"Content-Transfer-Encoding: base64\r\n"),
    st.binary(max_size=100),
)


@st.composite
def forms(draw):
    parts = draw(
        st.lists(
            st.tuples(st.lists(part_headers, max_size=3), st.binary(max_size=100)), max_size=12
        )
    )
    body = (
        b"".join(
            b"--x\r\n" + b"".join(head) + b"\r\n" + content + b"\r\n" for head, content in parts
        )
        + b"--x--\r\n"
    )
    return draw(boundaries).replace(b"\n", b"") + b"\n" + body[: draw(st.integers(0, len(body)))]


@few
@given(st.one_of(forms(), damaged("multipart")))
def test_any_form_is_answered_or_refused_as_a_problem(data):
    targets.multipart(data)


sizes = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**32 - 1, 2**63, 10**18]))


@st.composite
def infer_requests(draw):
    """Any numbers wherever a size is stated: the header, the shape, the tensor's, the elements'."""
    elements = draw(st.lists(st.binary(max_size=20), max_size=3))
    stated = [
        draw(st.one_of(st.just(len(element)), st.integers(0, 2**32 - 1))) for element in elements
    ]
    tensor = b"".join(
        struct.pack("<I", size) + element for size, element in zip(stated, elements, strict=True)
    )
    tensor = draw(st.one_of(st.just(tensor), st.binary(max_size=50)))
    description = {
        "name": draw(st.sampled_from(["image", "image_u8"])),
        "datatype": draw(st.sampled_from(["BYTES", "UINT8"])),
        "shape": draw(st.one_of(st.just([len(elements)]), st.lists(sizes, max_size=5))),
        "parameters": {"binary_data_size": draw(st.one_of(st.just(len(tensor)), sizes))},
    }
    head = json.dumps({"inputs": [description]}).encode()
    length = draw(st.one_of(st.just(str(len(head))), sizes.map(str), st.text(max_size=10))).encode()
    return length.replace(b"\n", b"") + b"\n" + head + tensor


@few
@given(st.one_of(infer_requests(), damaged("kserve")))
@example(b"0\n")
@example(b"0\n" + b"\0" * 100)
def test_any_sizes_are_answered_or_refused_as_kserve_does(data):
    targets.kserve(data)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            seeds("data-uri")[0].decode(),
            "fake:latency_ms=0",
            "image",
            "image_url",
            "BYTES",
            "UINT8",
            "float",
        ]
    ),
)
names = st.sampled_from(
    [
        "model",
        "input",
        "messages",
        "images",
        "inputs",
        "texts",
        "content",
        "type",
        "image_url",
        "url",
        "image",
        "bytes",
        "name",
        "shape",
        "datatype",
        "data",
        "parameters",
        "outputs",
        "dimensions",
        "encoding_format",
        "embedding_types",
        "output_dimension",
        "binary_data_size",
        "id",
    ]
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names | st.text(max_size=5), inner, max_size=4)
    ),
)
bodies = st.fixed_dictionaries(
    {"model": st.just("fake:latency_ms=0")},
    optional=dict.fromkeys(
        ("input", "messages", "images", "inputs", "dimensions", "output_dimension"), values
    ),
)


@few
@given(
    st.one_of(
        st.one_of(values, bodies).map(lambda body: json.dumps(body).encode()), damaged("json")
    )
)
@example(b"[" * 5000)
@example(b'{"model": "fake:latency_ms=0", "input": ' + b"[" * 500 + b"]" * 500 + b"}")
def test_any_json_is_answered_or_refused_as_each_dialect_does(data):
    targets.json_bodies(data)
