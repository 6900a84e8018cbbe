"""Workers on a Ray cluster: how many, with what, and what they see."""

import os

import pytest

from mlcd.errors import ConfigInvalid
from mlcd.pipelines.ray import session as ray_session
from mlcd.pipelines.ray.session import RayOptions, check_address


def test_gpus_are_hidden_where_a_worker_has_none_and_come_back(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for before in ("7", None):
        if before is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        for num, seen in ((0.5, before), (0.0, "")):
            with ray_session.gpus_hidden(num):
                assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
            assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_half_of_a_workers_memory_is_for_centers():
    assert RayOptions().memory_bytes({"CPU": 4.0, "memory": 8e9}) == 2e9
    assert RayOptions(cpus=8).memory_bytes({"CPU": 4.0, "memory": 8e9}) == 8e9
    assert RayOptions(memory_gib=2).memory_bytes({"CPU": 4.0, "memory": 1.0}) == 2 << 30
    assert RayOptions(memory_gib=2).num_workers({"CPU": 64.0, "memory": 7 << 30}) == 3
    assert RayOptions(memory_gib=2).demand["memory"] == 2 << 30
    assert ray_session.centers_at_once(1_000_000, 8 * 512, 2e9) == 244_140
    assert ray_session.centers_at_once(1000, 8 * 512, 2e9) == 1000
    assert ray_session.centers_at_once(1000, 8 * 512, 1) == ray_session._LEAST_CENTERS


def test_as_many_workers_as_fit():
    assert RayOptions().num_workers({"CPU": 4.0}) == 4
    assert RayOptions(cpus=3, gpus=0.5).num_workers({"CPU": 64.0, "GPU": 4.0}) == 8
    assert RayOptions(gpus=1).num_workers({"CPU": 64.0}) == 1  # one that is added may have it
    assert RayOptions(workers=7).num_workers({}) == 7


@pytest.mark.parametrize("address", ["rain", "ray://", "ray://host", "ray://:1", "ray:10001"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigInvalid, match="ray://HOST:PORT"):
        check_address(address)
