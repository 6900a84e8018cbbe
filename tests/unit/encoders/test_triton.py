"""The adapter's requests and its handling of each answer, with a scripted gRPC server.

The real Triton is in tests/triton.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from mlcd.encoders import triton
from mlcd.encoders.triton import open_triton
from mlcd.errors import ArtifactInvalid, DeadlineExceeded, InvalidInput, Overloaded, Unavailable
from mlcd.images.transform import PreprocessSpec

SPEC = PreprocessSpec(resize_shortest=4, crop=4)
PARAMETERS = {"precision": "fp32", "fingerprint.3": "f" * 64, "preprocess.3": SPEC.to_json()}
SECRET = "0x7f3a of some request"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Told(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server of the model m, version 3; `answer` may be replaced by what raises or returns
    another.
    """

    def __init__(self, parameters=PARAMETERS):
        self.parameters = parameters
        self.requests: list[tuple[service_pb2.ModelInferRequest, dict[str, str], float]] = []
        self.answer: Callable[[np.ndarray], np.ndarray] = lambda images: images.mean(
            axis=(2, 3)
        ).astype(np.float32)
        self.delay_s: Callable[[np.ndarray], float] = lambda _: 0
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.ready = True
        self.ended: int | None = None
        """Inferences of one image that others asked for, of 1 s each; None keeps the statistics to
        itself.
        """

    async def ModelMetadata(self, request, context):
        return service_pb2.ModelMetadataResponse(name=request.name, versions=["1", "3", "2"])

    async def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=self.ready)

    async def ModelStatistics(self, request, context):
        if self.ended is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header"
            )
        answer = service_pb2.ModelStatisticsResponse()
        found = answer.model_stats.add(
            name=request.name, version=request.version, inference_count=self.ended
        )
        row = found.batch_stats.add(batch_size=1)
        row.compute_infer.count, row.compute_infer.ns = self.ended, self.ended * 10**9
        return answer

    async def ModelConfig(self, request, context):
        config = model_config_pb2.ModelConfig(name=request.name, max_batch_size=8)
        config.input.add(name="image_u8", data_type=model_config_pb2.TYPE_UINT8, dims=[3, 4, 4])
        config.output.add(name="embedding", data_type=model_config_pb2.TYPE_FP32, dims=[3])
        for key, value in self.parameters.items():
            config.parameters[key].string_value = value
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelInfer(self, request, context):
        self.requests.append(
            (request, dict(context.invocation_metadata()), context.time_remaining())
        )
        if self.status is not None:
            await context.abort(*self.status)
        images = np.frombuffer(request.raw_input_contents[0], np.uint8).reshape(
            request.inputs[0].shape
        )
        await asyncio.sleep(self.delay_s(images))
        rows = self.answer(images)
        response = service_pb2.ModelInferResponse(raw_output_contents=[rows.tobytes()])
        response.outputs.add(name="embedding", datatype="FP32", shape=rows.shape)
        return response


@contextlib.asynccontextmanager
async def serving(told):
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(told, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def opened(told, **options):
    async with serving(told) as url:
        encoder = await open_triton(url, "m", **options)
        try:
            yield encoder
        finally:
            await encoder.close()


def images(num):
    return np.random.default_rng(0).integers(1, 256, (num, 3, 4, 4), dtype=np.uint8)


def test_a_request_carries_pixels_version_deadline_and_trace():
    told = Told()

    async def embed():
        async with opened(told) as encoder:
            assert (encoder.version, encoder.fingerprint, encoder.preprocess) == (3, "f" * 64, SPEC)
            await encoder.encode(images(2)[:, :, ::-1], timeout_s=1.5, traceparent=TRACE)

    asyncio.run(embed())
    request, metadata, remaining_s = told.requests[-1]
    assert (request.model_name, request.model_version) == ("m", "3")
    assert (request.inputs[0].name, request.inputs[0].datatype, list(request.inputs[0].shape)) == (
        "image_u8",
        "UINT8",
        [2, 3, 4, 4],
    )
    assert request.raw_input_contents[0] == images(2)[:, :, ::-1].tobytes()
    assert [output.name for output in request.outputs] == ["embedding"]
    assert request.parameters["timeout"].int64_param == 1_500_000
    assert metadata["traceparent"] == TRACE
    assert 0.5 < remaining_s < 1.7  # gRPC rounds it up


def test_a_batch_over_the_models_goes_in_parts_and_comes_in_order():
    told = Told()

    async def embed():
        async with opened(told) as encoder:
            return await encoder.encode(images(19), timeout_s=5)

    rows = asyncio.run(embed())
    assert sorted(request.inputs[0].shape[0] for request, _, _ in told.requests[1:]) == [3, 8, 8]
    means = images(19).mean(axis=(2, 3))
    assert rows == pytest.approx(means / np.linalg.norm(means, axis=1, keepdims=True), abs=1e-5)


def test_a_row_without_a_direction_is_zeros():
    told = Told()

    async def embed():
        async with opened(told) as encoder:
            told.answer = lambda images: np.full((len(images), 3), np.nan, np.float32)
            return await encoder.encode(images(2), timeout_s=5)

    assert (asyncio.run(embed()) == 0).all()


@pytest.mark.parametrize("num", [1, 20])
@pytest.mark.parametrize(
    ("code", "text", "error", "message"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", Overloaded, "queue is full"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Request timeout expired",
            DeadlineExceeded,
            "passed in Triton's queue",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Server is stopping",
            Unavailable,
            "cannot be reached: is it up",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Request for unknown model: 'm'",
            Unavailable,
            "version 3 of the model m is not",
        ),
        (grpc.StatusCode.NOT_FOUND, "no", Unavailable, "version 3 of the model m is not loaded"),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "late",
            DeadlineExceeded,
            "did not answer within the time",
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "shape", Unavailable, "failed in Triton"),
        (grpc.StatusCode.INTERNAL, "CUDA", Unavailable, "failed in Triton"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "memory", Unavailable, "failed in Triton"),
        (grpc.StatusCode.UNKNOWN, "", Unavailable, "failed in Triton"),
    ],
)
def test_each_refusal_is_one_of_ours_once_and_without_its_text(code, text, error, message, num):
    told = Told()

    async def embed():
        async with opened(told) as encoder:
            told.status = (code, f"{text} {SECRET}")
            with pytest.raises(error, match=message) as caught:
                await encoder.encode(images(num), timeout_s=5)
            assert type(caught.value) is error
            assert SECRET not in str(caught.value)
            # The caller's request, in parts where it is large, is sent once; the rest is what the
            # watcher asks.
            ours = [request for request, _, remaining in told.requests[1:] if remaining > 2.5]
            assert len(ours) <= -(-num // 8)

    asyncio.run(embed())


@pytest.mark.parametrize("shape", [(2, 4), (1, 3), (2, 3, 1)])
def test_an_answer_of_another_shape_is_no_embedding(shape):
    told = Told()

    async def embed():
        async with opened(told) as encoder:
            told.answer = lambda _: np.ones(shape, np.float32)
            with pytest.raises(Unavailable, match="unlike its configuration"):
                await encoder.encode(images(2), timeout_s=5)

    asyncio.run(embed())


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint.3": None},
        {"precision": None},
        {"preprocess.3": None},
        {"preprocess.3": "no JSON"},
        {"preprocess.3": PreprocessSpec(resize_shortest=8, crop=8).to_json()},
    ],
)
def test_a_model_that_does_not_say_whose_it_is_is_refused(changes):
    parameters = {
        key: value for key, value in {**PARAMETERS, **changes}.items() if value is not None
    }

    async def embed():
        async with opened(Told(parameters)):
            pass

    with pytest.raises(ArtifactInvalid, match="export it with"):
        asyncio.run(embed())


def test_a_server_too_busy_at_the_start_is_asked_again():
    told = Told()
    told.status = (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")

    async def embed():
        async with serving(told) as url:
            opening = asyncio.create_task(open_triton(url, "m"))
            await asyncio.sleep(0.3)
            assert not opening.done()
            told.status = None
            await (await opening).close()

    asyncio.run(embed())
    assert len(told.requests) > 2


def test_an_idle_model_is_seen_to_embed_and_a_busy_one_left_alone(monkeypatch):
    monkeypatch.setattr(triton, "_RECENT_S", 0.4)
    told = Told()

    async def embed():
        async with opened(told) as encoder:
            await asyncio.sleep(1.2)
            idle = len(told.requests) - 1
            for _ in range(24):
                await encoder.encode(images(1), timeout_s=5)
                await asyncio.sleep(0.05)
            busy = len(told.requests) - 1 - idle - 24
            assert idle >= 1
            assert busy == 0
            # Nobody asks, and it is noticed all the same.
            told.status = (grpc.StatusCode.INTERNAL, "CUDA")
            started = time.perf_counter()
            while encoder.up:
                assert time.perf_counter() - started < 2
                await asyncio.sleep(0.02)

    asyncio.run(embed())


def test_while_others_are_answered_a_late_probe_means_nothing():
    told = Told()

    async def embed():
        async with opened(told, probe_timeout_s=0.5) as encoder:
            told.delay_s = lambda images: 5 if not images.any() or len(images) == 2 else 0.05
            with pytest.raises(DeadlineExceeded):
                await encoder.encode(images(2), timeout_s=0.1)
            for _ in range(20):
                await encoder.encode(images(1), timeout_s=5)
            assert encoder.up

    asyncio.run(embed())


async def others_are_answered(told):
    while True:
        await asyncio.sleep(0.1)
        told.ended += 1


def test_while_another_client_is_answered_nothing_hangs():
    told = Told()
    told.ended = 0

    async def embed():
        async with opened(told, probe_timeout_s=0.3) as encoder:
            told.delay_s = lambda _: 60
            others = asyncio.create_task(others_are_answered(told))
            for _ in range(4):
                with pytest.raises(DeadlineExceeded):
                    await encoder.encode(images(1), timeout_s=0.5)
                assert encoder.up
            assert encoder.patience_s == pytest.approx(
                2, rel=0.2
            )  # batches of others take a second
            others.cancel()
            with pytest.raises(Unavailable):  # now nobody is
                await encoder.encode(images(1), timeout_s=0.2)
            await until_down(encoder, 4)

    asyncio.run(embed())


def test_a_model_that_others_use_needs_no_image_of_ours(monkeypatch):
    monkeypatch.setattr(triton, "_RECENT_S", 0.4)
    told = Told()
    told.ended = 0

    async def embed():
        async with opened(told):
            others = asyncio.create_task(others_are_answered(told))
            await asyncio.sleep(1.2)
            others.cancel()

    asyncio.run(embed())
    assert len(told.requests) == 1


async def until_down(encoder, limit_s):
    started = time.perf_counter()
    while encoder.up:
        assert time.perf_counter() - started < limit_s
        await asyncio.sleep(0.02)


def test_a_model_that_always_takes_long_does_not_hang():
    told = Told()
    told.delay_s = lambda _: 0.5

    async def embed():
        async with opened(told, probe_timeout_s=0.1) as encoder:
            with pytest.raises(DeadlineExceeded):
                await encoder.encode(images(1), timeout_s=0.2)
            await asyncio.sleep(0.8)
            assert encoder.up
            told.delay_s = lambda _: 30
            with pytest.raises(DeadlineExceeded):
                await encoder.encode(images(1), timeout_s=0.2)
            await asyncio.sleep(2)
            assert not encoder.up

    asyncio.run(embed())


def test_other_input_never_leaves():
    told = Told()

    async def embed():
        async with opened(told) as encoder:
            with pytest.raises(InvalidInput):
                await encoder.encode(images(1)[0], timeout_s=5)
            assert len(told.requests) == 1

    asyncio.run(embed())


def test_preprocessing_is_read_as_it_was_written():
    assert PreprocessSpec.from_dict(json.loads(PARAMETERS["preprocess.3"])) == SPEC
