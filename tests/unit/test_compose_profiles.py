"""docker-compose.yml and what is added to it, read as compose reads them, without Docker."""

import re
from pathlib import Path

import pytest
from compose_spec import PyOptions

from mlcd.indexes.gpu_vectors import GRAPH_LEAST_BYTES

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy" / "compose").glob("*.yml"))]
OPEN_TO_THE_HOST = {"api"}
ALWAYS = {"api", "worker", "redis"}


def read(file):
    """The services of a file where no variable is set, with its merges applied.

    Raises ValueError for a field that compose does not know, or a value that it does not take.
    """
    text = re.sub(r"\$\{\w+:([-+])([^}]*)\}", _unset, file.read_text())
    options = PyOptions()
    options.apply_merge = True
    return options.from_yaml(text).to_dict()


def _unset(variable):
    return variable[2] if variable[1] == "-" else ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_compose_takes_every_file(file):
    assert read(file)["services"]


def test_the_default_is_the_service_alone_and_a_profile_adds_what_it_is_named_for():
    services = read(FILES[0])["services"]
    profiles = {name: set(service.get("profiles", ())) for name, service in services.items()}
    assert {name for name, of in profiles.items() if not of} == ALWAYS
    assert profiles["postgres"] == {"postgres"}
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert ("ports" in service) == (name in OPEN_TO_THE_HOST), name


def test_what_is_not_asked_for_mounts_nothing_that_is_read():
    services = read(FILES[0])["services"]
    binds = {
        mount["target"]: mount
        for mount in services["api"]["volumes"]
        if isinstance(mount, dict) and mount["type"] == "bind"
    }
    assert set(binds) == {"/srv/model", "/photos"}  # the image's model is at /srv/mlcd/model
    for mount in binds.values():
        assert (mount["source"], mount["read_only"]) == ("./LICENSE", True)
    assert not services["api"]["environment"]["MLCD_EXPLORE__PLACE"]


def test_with_a_gpu_the_server_has_memory_for_the_least_graph_of_512_dimensions():
    graphs = pytest.importorskip("mlcd.indexes.gpu_graph")
    limit = read(ROOT / "deploy" / "compose" / "gpu.yml")["services"]["api"]["mem_limit"]
    num_rows = GRAPH_LEAST_BYTES // (4 * 512)
    limit_bytes = int(limit.removesuffix("gb")) << 30
    assert num_rows * graphs._HOST_BYTES_PER_ROW <= graphs._HOST_SHARE * limit_bytes


def test_every_volume_and_network_of_a_service_is_declared():
    composed = read(FILES[0])
    for name, service in composed["services"].items():
        named = [
            volume.split(":")[0]
            for volume in service.get("volumes", ())
            if isinstance(volume, str) and not volume.startswith((".", "/"))
        ]
        assert set(named) <= set(composed["volumes"]), name
        assert set(service.get("networks", ())) <= set(composed["networks"]), name
    assert "postgres" in str(composed["services"]["postgres"]["volumes"])
