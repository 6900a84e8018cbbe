"""An encoder behind an endpoint: the bytes on the wire, and everything that a server may do."""

import hashlib
import json
import logging
import shutil
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from threading import Lock, Timer

import numpy as np
import pytest

import mlcd
from mlcd.encoders import endpoint_client, has_text, open_encoder, open_text_encoder
from mlcd.encoders.endpoint import draw_probe_images
from mlcd.encoders.endpoint_forms import DIALECTS, EndpointAddress
from mlcd.encoders.options import DEFAULTS, EncoderOptions
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NoTextTower, Unavailable
from mlcd.models.text_as_ids import Utf8Tokenizer, to_text
from mlcd.pipelines.resolve import make_portable_spec, resolve_model
from tests.conftest import call_mlcd, free_port, write_digits
from tests.endpoint_stub import DIMENSION, SIDE, Stub, image_row, text_row
from tests.integration.running import serving

KEY = "sk-0123456789-secret"
IMAGES = np.random.default_rng(0).integers(0, 256, (40, 3, SIDE, SIDE), np.uint8)
TEXTS = ["a cat", "ein Fahrrad", "一只猫", "https://example.org/a.png", "tail\0", "two\nlines"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache, and so records, of each test's own; and quick retries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(endpoint_client, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint_client, "_LONGEST_PAUSE_S", 0.1)
    return tmp_path / "cache"


@pytest.fixture
def stub():
    started = Stub()
    yield started
    started.down()


def pixels(images=IMAGES):
    with closing(open_encoder("pixels")) as encoder:
        return encoder.encode(images)


def encode(spec, images=IMAGES, options=DEFAULTS):
    with closing(open_encoder(spec, options)) as encoder:
        return encoder.encode(images)


def text_rows(texts=TEXTS):
    rows = np.stack([text_row(text) for text in texts]).astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("form", DIALECTS)
def test_rows_are_those_of_the_pixels_and_texts_in_every_form(form, monkeypatch):
    stub = Stub(form)
    monkeypatch.setenv("MLCD_ENDPOINT_KEY", KEY)
    np.testing.assert_array_equal(encode(stub.url()), pixels())
    assert has_text(stub.url())
    with closing(open_text_encoder(stub.url())) as texts:
        np.testing.assert_allclose(texts.encode(texts.tokenizer(TEXTS)), text_rows(), atol=1e-6)
        assert texts.encode(texts.tokenizer([])).shape == (0, DIMENSION)
    paths = {"cohere": "/v2/embed", "tei": "/embed"}
    for path, headers, body in stub.requests:
        assert path == paths.get(form, "/v1/embeddings")
        assert body.get("model", "org/Some-Model") == "org/Some-Model"
        assert headers["Authorization"] == f"Bearer {KEY}"
        assert headers["Host"] == f"127.0.0.1:{stub.port}"
    stub.down()


@pytest.mark.parametrize("form", ["openai", "vllm", "cohere", "jina"])
def test_our_own_server_gives_the_rows_of_its_model(form, starter):
    version = "v2" if form == "cohere" else "v1"
    with serving("pixels") as server:
        spec = server.url.replace("http", f"{form}+http") + f"/{version}?size=16#pixels"
        black = np.zeros((1, 3, SIDE, SIDE), np.uint8)  # which the server refuses
        images = np.concatenate([IMAGES, black])
        np.testing.assert_array_equal(encode(spec, images), pixels(images))
        assert not has_text(spec)
        with pytest.raises(NoTextTower):
            open_text_encoder(spec)


def test_our_own_server_gives_both_towers_of_the_starter(starter):
    with closing(open_encoder(str(starter))) as local, serving(starter) as server:
        side, crop = local.preprocess.resize_shortest, local.preprocess.crop
        spec = f"openai+{server.url}/v1?size={side}#{local.name}"
        images = np.random.default_rng(1).integers(0, 256, (5, 3, side, side), np.uint8)
        inner = slice((side - crop) // 2, (side + crop) // 2)
        expected = local.encode(images[:, :, inner, inner])
        np.testing.assert_allclose(encode(spec, images), expected, atol=1e-4)
        with (
            closing(open_text_encoder(spec)) as texts,
            closing(open_text_encoder(str(starter))) as local_texts,
        ):
            expected = local_texts.encode(local_texts.tokenizer(TEXTS))
            np.testing.assert_allclose(texts.encode(texts.tokenizer(TEXTS)), expected, atol=1e-4)


@pytest.mark.parametrize("as_date", [False, True])
def test_a_wait_that_the_endpoint_asks_for_is_kept(stub, as_date):
    with closing(open_encoder(stub.url())) as encoder:
        until = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        stub.failures = [(429, {"Retry-After": until if as_date else 1}, b"slow down")]
        started = time.monotonic()
        np.testing.assert_array_equal(encoder.encode(IMAGES[:3]), pixels(IMAGES[:3]))
        assert time.monotonic() - started > 0.9
        stub.failures = [(429, {"Retry-After": 100_000}, b"")]
        with pytest.raises(Unavailable, match="answers 429, and has not recovered within 600 s"):
            encoder.encode(IMAGES[:3])  # at once: it would wait longer than it may


def test_an_outage_delays_and_the_probes_are_asked_again(stub):
    with closing(open_encoder(stub.url(batch=40))) as encoder:
        stub.failures = [(503, {}, b"")] * 3 + [(502, {}, b""), (504, {}, b"")]
        before = len(stub.requests)
        np.testing.assert_array_equal(encoder.encode(IMAGES), pixels())
        assert len(stub.requests) == before + 5 + 1 + 1  # failures, rows, probes


def test_a_killed_endpoint_that_comes_back_only_delays(stub, caplog):
    with closing(open_encoder(stub.url(wait=30))) as encoder:
        stub.down()
        Timer(0.7, stub.up).start()
        started = time.monotonic()
        np.testing.assert_array_equal(encoder.encode(IMAGES), pixels())
        assert time.monotonic() - started > 0.6
        assert "trying again for up to 30 s" in caplog.text


def test_an_endpoint_that_stays_away_is_unavailable(stub):
    with closing(open_encoder(stub.url(wait=1))) as encoder:
        stub.down()
        started = time.monotonic()
        with pytest.raises(Unavailable, match="has not recovered within 1 s"):
            encoder.encode(IMAGES)
        assert time.monotonic() - started < 5
    with pytest.raises(Unavailable, match="cannot be reached"):
        open_encoder(stub.url(), EncoderOptions(endpoint_wait_s=0.5))
    stub.up()


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (lambda rows: rows[1:], r"answers with 2 embeddings for 3 inputs"),
        (lambda rows: [*rows, rows[0]], r"answers with 4 embeddings for 3 inputs"),
        (lambda rows: [rows[0], rows[1], rows[2][1:]], "embeddings of several shapes"),
        ((200, {}, b"<html>"), "something other than JSON"),
        ((200, {}, b"[" * 200_000), "something other than JSON"),
        ((200, {}, {"data": [{"index": 0, "embedding": "!"}]}), "other than embeddings"),
        ((200, {}, {"data": [{"index": i, "embedding": [{}]} for i in range(3)]}), "other than em"),
        ((200, {}, {"data": [{"index": 1, "embedding": [1]}] * 3}), "other than embeddings"),
        ((200, {}, b"[" + b" " * 3_000_000), "answers with more than"),
        ((500, {}, b"out of memory"), "answers 500 .out of memory."),
    ],
)
def test_another_answer_than_rows_is_unavailable(stub, failure, message):
    with closing(open_encoder(stub.url())) as encoder:
        stub.failures = [failure]
        with pytest.raises(Unavailable, match=message):
            encoder.encode(IMAGES[:3])
        np.testing.assert_array_equal(encoder.encode(IMAGES[:3]), pixels(IMAGES[:3]))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((401, {}, {"error": {"message": "bad key"}}), "answers 401 .bad key.: set MLCD_ENDPOINT"),
        ((404, {}, {"detail": "no such model"}), "answers 404 .no such model.: check the URL"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "answers 302: give the URL"),
        ((409, {}, b"x\n\x1b[31m" + b"y" * 1000), r"answers 409 .x \[31my{294}….: check"),
        (lambda rows: [row[1:] for row in rows], "drifted: another model is behind it .767 num"),
    ],
)
def test_a_refusal_says_why_and_is_not_repeated(stub, failure, message):
    with closing(open_encoder(stub.url())) as encoder:
        before = len(stub.requests)
        stub.failures = [failure]
        with pytest.raises(ConfigInvalid, match=message):
            encoder.encode(IMAGES[:3])
        assert len(stub.requests) == before + 1


def test_one_bad_image_is_a_row_of_zeros(stub):
    with closing(open_encoder(stub.url())) as encoder:
        bad = image_row_of(IMAGES[5])
        stub.refuse = lambda png: np.array_equal(image_row(png), bad)
        expected = pixels()
        expected[5] = 0
        np.testing.assert_array_equal(encoder.encode(IMAGES), expected)
        stub.refuse = lambda _: True
        with pytest.raises(ConfigInvalid, match=r"answers 422 .one of them is bad."):
            encoder.encode(IMAGES[:3])
        stub.refuse = lambda _: False
        stub.failures = [lambda rows: [rows[0], rows[1] * np.nan, np.full_like(rows[2], np.inf)]]
        rows = encoder.encode(IMAGES[:3])
        np.testing.assert_array_equal(rows, pixels(IMAGES[:3]) * [[1], [0], [0]])


def image_row_of(image):
    return image.astype(np.float32).ravel()


def test_an_endpoint_that_has_changed_is_refused(stub, own_cache):
    encode(stub.url())
    stub.noise = 0.02  # cosine 0.9998
    np.testing.assert_allclose(encode(stub.url()), pixels(), atol=0.01)
    stub.noise = 0.1
    with pytest.raises(ConfigInvalid, match=r"cosine 0.99[0-9]+ to its record\): restore"):
        encode(stub.url())
    stub.noise, stub.turn = 0.0, 1
    with pytest.raises(ConfigInvalid, match=r"the answers of .* have drifted: another model"):
        encode(stub.url())
    with pytest.raises(ConfigInvalid, match="have drifted"):
        open_text_encoder(stub.url())
    (record,) = own_cache.glob("mlcd/endpoints/*.safetensors")
    record.unlink()
    assert not np.array_equal(encode(stub.url()), pixels())


def test_an_endpoint_that_changes_in_an_outage_is_refused(stub):
    with closing(open_encoder(stub.url())) as encoder:
        stub.down()
        stub.turn = 3
        Timer(0.5, stub.up).start()
        for _ in range(2):  # for good
            with pytest.raises(ConfigInvalid, match="have drifted: another model is behind it"):
                encoder.encode(IMAGES)
        stub.turn = 0
        np.testing.assert_array_equal(encoder.encode(IMAGES), pixels())


def test_a_damaged_record_is_named(stub, own_cache):
    encode(stub.url())
    (record,) = own_cache.glob("mlcd/endpoints/*.safetensors")
    record.write_bytes(record.read_bytes()[:100])
    with pytest.raises(ArtifactInvalid, match=r"cannot be read: .*: remove the file"):
        encode(stub.url())


def test_the_fingerprint_stands_for_model_size_and_answers_but_not_for_noise(stub, own_cache):
    def fingerprint(spec):
        for record in own_cache.glob("mlcd/endpoints/*.safetensors"):
            record.unlink()
        with closing(open_encoder(spec)) as encoder:
            return encoder.fingerprint

    own = fingerprint(stub.url())
    stub.noise = 0.01
    assert {fingerprint(stub.url()) for _ in range(5)} == {own}
    assert fingerprint(stub.url(batch=1, parallel=2, wait=5)) == own
    stub.noise = 0
    assert fingerprint(stub.url(size=32)) != own
    assert fingerprint(stub.url().replace("Some", "Other")) != own
    stub.turn = 1
    assert fingerprint(stub.url()) != own
    stub.turn, stub.texts = 0, False
    assert fingerprint(stub.url()) != own
    stub.texts = True
    fingerprint(stub.url())
    with (
        closing(open_encoder(stub.url(), EncoderOptions(exif="ignore"))) as images,
        closing(open_text_encoder(stub.url(), EncoderOptions(exif="ignore"))) as texts,
    ):
        assert images.fingerprint == texts.fingerprint != own


def test_the_probes_do_not_change():
    """A change makes every record of a user look like another model."""
    digest = hashlib.sha256(draw_probe_images(64).tobytes()).hexdigest()
    assert digest == "bb379c9897b2f6f4fb6ea54fafb887bcccf9992bb8ab5c1e4b541c14f5f64408"


def test_a_model_without_images_is_refused(stub):
    stub.images = False
    with pytest.raises(ConfigInvalid, match=r"a model must embed images: .*takes no image"):
        open_encoder(stub.url())
    stub.images = True
    stub.read = lambda body: ("text", body["input"])  # as servers that ignore `modality`
    with pytest.raises(ConfigInvalid, match="two files of the same pixels differ"):
        open_encoder(stub.url())
    with pytest.raises(ConfigInvalid, match="two files of the same pixels differ"):
        has_text(stub.url())


def test_images_and_texts_of_several_dimensions_are_refused(stub):
    stub.failures = [None, None, lambda rows: [row[1:] for row in rows]]
    with pytest.raises(ConfigInvalid, match="into one space, got dimensions 768 and 767"):
        open_encoder(stub.url())
    stub.failures = [None, lambda rows: [row[1:] for row in rows]]
    with pytest.raises(ConfigInvalid, match="767 numbers, 768 before"):
        open_encoder(stub.url(batch=1))
    stub.failures = [lambda rows: [rows[0]] * 8, lambda rows: rows]
    with pytest.raises(ConfigInvalid, match="must embed images, got one row for all"):
        open_encoder(stub.url())
    stub.failures = [lambda rows: [row * 0 for row in rows]]
    with pytest.raises(ConfigInvalid, match="must embed every probe image"):
        open_encoder(stub.url())


def test_a_model_without_texts_is_one_of_images(stub):
    stub.texts = False
    np.testing.assert_array_equal(encode(stub.url()), pixels())
    assert not has_text(stub.url())
    with pytest.raises(NoTextTower):
        open_text_encoder(stub.url())


def test_the_key_is_nowhere_but_in_requests(stub, tmp_path, monkeypatch, caplog, own_cache):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    monkeypatch.setenv("MLCD_ENDPOINT_KEY_FILE", str(file))
    caplog.set_level(logging.DEBUG)
    photos = write_digits(tmp_path / "photos", 5)
    done = call_mlcd("embed", photos, tmp_path / "out", "--model", stub.url())
    assert done.returncode == 0, done.stderr
    assert all(headers["Authorization"] == f"Bearer {KEY}" for _, headers, _ in stub.requests)
    with closing(open_encoder(stub.url())) as encoder:
        stub.failures = [(401, {}, {"error": f"the key {KEY} is wrong"})]
        with pytest.raises(ConfigInvalid, match="the key … is wrong") as refusal:
            encoder.encode(IMAGES)
        shown = f"{refusal.value!r} {encoder!r} {encoder._endpoint._client!r} {caplog.text}"
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    files += [path for path in own_cache.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        assert KEY.encode() not in path.read_bytes()
    assert KEY not in shown + done.stdout + done.stderr
    monkeypatch.setenv("MLCD_ENDPOINT_KEY", KEY)
    with pytest.raises(ConfigInvalid, match="are both set"):
        open_encoder(stub.url())
    monkeypatch.delenv("MLCD_ENDPOINT_KEY_FILE")
    for bad in ("two words", "line\nbreak", "ключ"):
        monkeypatch.setenv("MLCD_ENDPOINT_KEY", bad)
        with pytest.raises(ConfigInvalid, match="must be printable ASCII") as refusal:
            open_encoder(stub.url())
        assert bad not in str(refusal.value)
    monkeypatch.delenv("MLCD_ENDPOINT_KEY")
    monkeypatch.setenv("MLCD_ENDPOINT_KEY_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigInvalid, match="must name a readable file"):
        open_encoder(stub.url())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ollama+https://h/v1#m", "DIALECT one of openai"),
        ("openai+https://user:sesame@h/v1#m", "must not contain a user or a password"),
        ("openai+https://sesame@h/v1#m", "must not contain a user or a password"),
        ("openai+https://h/v1?api_key=sesame#m", "may have size, batch, parallel, wait"),
        ("openai+https://h/v1?size=8#m", "size of an endpoint must be an integer from 16 to 2048"),
        ("openai+https://h/v1?size=1e3#m", "must be an integer from 16 to 2048, got 1e3"),
        ("openai+https://h/v1?batch=#m", "must be an integer from 1 to 256, got"),
        ("openai+https://h/v1", "needs the name of its model after #"),
        ("openai+https://h/v1#m?size=224", "a query before #"),
        ("openai+https://h/v1#a b", "needs the name of its model after #"),
        ("openai+https://h/v1#" + "m" * 129, "got 129"),
        ("openai+https://h:99999/v1#m", "host or port is invalid"),
        ("openai+https://[::1/v1#m", "host or port is invalid"),
        ("openai+https:///v1#m", "must be ASCII, got no host"),
        ("openai+https://bücher.de/v1#m", "must be ASCII"),
        ("openai+https://h/v1 x#m", "must be ASCII"),
        ("openai+https://h/v1\r\nX: y#m", "must be ASCII|host"),
    ],
)
def test_a_bad_address_is_refused_before_any_request(spec, message):
    for open_ in (open_encoder, open_text_encoder, has_text):
        with pytest.raises(ConfigInvalid, match=message) as refusal:
            open_(spec)
        assert "sesame" not in str(refusal.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("openai+http://8.8.8.8/v1#m", "with http must have a private address, got 8.8.8.8"),
        ("openai+http://169.254.169.254/v1#m", "which no endpoint may have"),
        ("openai+https://169.254.169.254/v1#m", "which no endpoint may have"),
        ("openai+https://[fe80::1]/v1#m", "which no endpoint may have"),
    ],
)
def test_a_forbidden_address_is_refused_at_once(spec, message):
    started = time.monotonic()
    with pytest.raises(ConfigInvalid, match=message):
        open_encoder(spec)
    assert time.monotonic() - started < 2


def test_the_environment_names_no_proxy(stub, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    np.testing.assert_array_equal(encode(stub.url()), pixels())


def test_the_address_without_what_leaves_the_rows_alone():
    address = EndpointAddress.parse("openai+https://[::1]:8/v1/?wait=5&batch=2#Qwen/Qwen3%2Dx")
    assert (address.name, address.wait_s, address.batch, address.path) == (
        "Qwen/Qwen3-x",
        5,
        2,
        "/v1",
    )


def test_a_certificate_is_checked(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = [*command.split(), "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    stub = Stub(tls=context)
    with pytest.raises(
        ConfigInvalid, match="must have a valid certificate: name its CA with SSL_CERT"
    ):
        open_encoder(stub.url())
    assert not stub.requests
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    np.testing.assert_array_equal(encode(stub.url()), pixels())
    stub.down()


def test_ctrl_c_does_not_wait_for_an_answer(stub):
    encoder = open_encoder(stub.url())
    stub.sleep_s = 20
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(encoder.encode, IMAGES)
        time.sleep(0.3)
        encoder.close()
        with pytest.raises(Unavailable, match="closed"):
            waiting.result(timeout=3)


def test_an_endless_answer_ends(stub, monkeypatch):
    monkeypatch.setattr(endpoint_client, "_ANSWER_S", 0.5)
    with closing(open_encoder(stub.url(wait=1))) as encoder:
        stub.sleep_s = 3
        with pytest.raises(Unavailable, match=r"cannot be reached \(ReadTimeout\), and has not"):
            encoder.encode(IMAGES[:3])


def test_requests_run_in_parallel_but_not_more_than_allowed(stub):
    with closing(open_encoder(stub.url(batch=1, parallel=5))) as encoder:
        running, most, lock, answer = 0, 0, Lock(), stub.answer

        def count(*request):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1
            return answer(*request)

        stub.answer = count
        with ThreadPoolExecutor(3) as pool:
            for rows in pool.map(encoder.encode, [IMAGES] * 3):
                np.testing.assert_array_equal(rows, pixels())
        assert most == 5


def test_options_of_an_engine_are_refused(stub):
    for options in (EncoderOptions(engine="torch"), EncoderOptions(precision="bf16")):
        with pytest.raises(ConfigInvalid, match="needs engine auto and precision fp32"):
            open_encoder(stub.url(), options)
    with closing(open_encoder(stub.url())) as encoder:
        assert (encoder.name, encoder.engine) == ("Some-Model", "endpoint")
        with pytest.raises(InvalidInput, match=r"expected uint8 images of shape \[N, 3, 16, 16\]"):
            encoder.encode(np.zeros((1, 3, 17, 17), np.uint8))
    encoder.close()
    with pytest.raises(Unavailable, match="closed"):
        encoder.encode(IMAGES)


def test_python_takes_it_as_any_model(stub):
    model = mlcd.load_model(stub.url())
    np.testing.assert_array_equal(model.embed(list(IMAGES.transpose(0, 2, 3, 1))), pixels())
    np.testing.assert_allclose(model.embed_texts(TEXTS), text_rows(), atol=1e-6)
    assert model.name == "Some-Model"


def test_a_spec_is_the_same_on_every_machine(stub):
    assert resolve_model(stub.url()) == make_portable_spec(stub.url()) == stub.url()


def test_texts_survive_as_ids():
    tokenizer = Utf8Tokenizer()
    texts = [*TEXTS, "", "x" * 8191, "x" * 8192, "\U0010ffff" * 2048]
    ids = tokenizer(texts)
    assert (ids.shape, ids.dtype) == ((len(texts), 2048), np.int64)
    assert [to_text(row) for row in ids] == texts
    tokenized = tokenizer.tokenize(["x" * 8192, "x" * 8193, "x" + "猫" * 3000], with_cut=True)
    assert tokenized.cut.tolist() == [False, True, True]
    assert tokenized.num.tolist() == [2048, 2048, -(-(1 + 2730 * 3) // 4)]
    assert to_text(tokenized.ids[2]) == "x" + "猫" * 2730
    with pytest.raises(InvalidInput, match="valid Unicode"):
        tokenizer(["\ud800"])


def test_an_embedding_that_an_outage_ends_is_resumed(stub, tmp_path):
    photos = write_digits(tmp_path / "photos", 200)
    expected = call_mlcd("embed", photos, tmp_path / "whole", "--model", stub.url(wait=1))
    assert expected.returncode == 0, expected.stderr
    seen = len(stub.requests) + 1  # the probes again

    def answer(*request, original=stub.answer):
        if len(stub.requests) > seen + 5:
            return 503, {}, b""
        return original(*request)

    stub.answer = answer
    out = tmp_path / "out"
    done = call_mlcd("embed", photos, out, "--model", stub.url(wait=1))
    assert done.returncode != 0
    assert "has not recovered within 1 s" in done.stderr
    assert not out.exists()
    del stub.answer
    done = call_mlcd("embed", photos, out, "--model", stub.url(wait=1))
    assert done.returncode == 0, done.stderr
    digests = [
        json.loads((path / "manifest.json").read_text())["digest"]
        for path in (tmp_path / "whole", out)
    ]
    assert digests[0] == digests[1]
