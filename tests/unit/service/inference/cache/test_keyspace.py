from dataclasses import replace

import pytest

from mlcd.images.decode import DecodeLimits
from mlcd.images.transform import PreprocessSpec
from mlcd.service.inference.cache.keyspace import redis_prefix
from mlcd.service.inference.cache.vectors import VectorFormat
from tests.unit.service.cached import served, space


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "e" * 64},
        {"engine": "torch"},
        {"precision": "bf16"},
        {"dimension": 4},
        {"preprocess": replace(PreprocessSpec(4, 4), exif="ignore")},
        {"preprocess": replace(PreprocessSpec(4, 4), decode="fast")},
        {"preprocess": PreprocessSpec(5, 4)},
        {"vectors": VectorFormat(3, "float16")},
        {"limits": DecodeLimits(max_pixels=7)},
    ],
)
def test_what_changes_a_vector_or_its_bytes_changes_every_key(changes):
    images = [b"", b"a", b"b"]
    before, after = space().keys(images), space(**changes).keys(images)
    assert not set(before) & set(after)
    assert len(set(before)) == 3


def test_the_same_model_has_the_same_keys_whatever_it_is_called_and_however_fast():
    first, again = space(), space(name="other", longest_s=9.0, max_batch=1)
    assert first.keys([b"a"]) == again.keys([b"a"])
    assert redis_prefix("f" * 64) == "mlcd:vector:1:ffffffffffff:"


def test_another_version_of_a_decoder_or_an_engine_shares_no_key(monkeypatch):
    before = space().keys([b"a"])
    for package in ("pillow", "openvino"):
        with monkeypatch.context() as patch:
            patch.setattr(
                "mlcd.service.inference.cache.keyspace.version",
                lambda name, changed=package: "9" if name == changed else "1",
            )
            one = space().keys([b"a"])
            patch.setattr("mlcd.service.inference.cache.keyspace.version", lambda name: "1")
            assert one != space().keys([b"a"]) != before


def test_an_engine_that_is_no_package_has_keys_too():
    assert space(engine="fake").keys([b"a"]) != space(engine="none").keys([b"a"])
    assert served(engine="fake").engine == "fake"
