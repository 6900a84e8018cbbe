"""Which parts are used, and why not: with the real packages, and with stubs where a machine would
need a GPU.
"""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import grpc
import pytest
import torch
from tritonclient.grpc import service_pb2, service_pb2_grpc

from mlcd.clustering import device_products
from mlcd.extras import install_command
from mlcd.images import nvimgcodec
from mlcd.indexes import faiss as faiss_module
from mlcd.indexes.faiss import searches_on_gpus
from mlcd.machine_parts import PartState, examine_parts
from tests.conftest import call_mlcd, free_port


def stub(monkeypatch, name, **attributes):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def torch_of(monkeypatch, cuda="13.0", fault=None):
    """A torch with one GPU, or whose driver fails with `fault`."""

    def init():
        if fault is not None:
            raise fault

    devices = SimpleNamespace(init=init, device_count=lambda: 1, get_device_name=lambda: "H200")
    version = SimpleNamespace(cuda=cuda)
    stub(
        monkeypatch,
        "torch",
        __version__="2.13.0",
        version=version,
        cuda=devices,
        device=torch.device,
    )


def test_each_package_of_this_machine_is_told_as_it_is():
    parts = examine_parts()
    assert parts["CUDA of torch"].used == (torch.version.cuda is not None)
    assert torch.__version__ in parts["CUDA of torch"].detail
    assert parts["GPU"].used == torch.cuda.is_available()
    assert parts["search on GPUs"].used == (torch.cuda.is_available() or searches_on_gpus())
    assert parts["compiled loops"].used
    assert all(state.used or state.remedy for state in parts.values())


def test_a_gpu_that_torch_sees_is_used_and_runs_the_kernels(monkeypatch):
    torch_of(monkeypatch)
    stub(monkeypatch, "triton")
    monkeypatch.setattr("mlcd.machine_parts.version", lambda name: "3.7.1")
    monkeypatch.setattr(device_products, "by_kernels", lambda device: device.type == "cuda")
    parts = examine_parts()
    assert str(parts["CUDA of torch"]) == "used: torch 2.13.0 is built with CUDA 13.0"
    assert str(parts["GPU"]) == "used: 1 x H200"
    assert str(parts["GPU kernels"]) == "used: Triton 3.7.1 compiles them"


def test_kernels_that_do_not_compile_give_the_compilers_reason(monkeypatch):
    def warn(device):
        warnings.warn("a GPU finds labels without kernels: no gcc\nat ...", stacklevel=2)
        return False

    torch_of(monkeypatch)
    stub(monkeypatch, "triton")
    monkeypatch.setattr(device_products, "by_kernels", warn)
    state = examine_parts()["GPU kernels"]
    assert (state.used, state.detail) == (False, "a GPU finds labels without kernels: no gcc")
    assert "gcc" in state.remedy


def test_without_a_driver_torch_says_why_and_the_rest_points_there(monkeypatch):
    message = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
    torch_of(monkeypatch, fault=RuntimeError(message))
    parts = examine_parts()
    told = "Found no NVIDIA driver on your system; work is done on the CPU"
    assert (parts["GPU"].used, parts["GPU"].detail) == (False, told)
    assert "--gpus all" in parts["GPU"].remedy
    assert parts["GPU kernels"].remedy == "see GPU"


def test_a_gpu_that_fails_is_a_reason(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA out of memory. Tried to allocate")

    torch_of(monkeypatch)
    stub(monkeypatch, "triton")
    monkeypatch.setattr(device_products, "by_kernels", fail)
    assert "out of memory" in examine_parts()["GPU kernels"].detail


def test_a_package_that_cannot_be_loaded_is_a_reason(monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise ImportError("libcudart.so.13: cannot open shared object file")

    broken = Broken("faiss")
    broken.__spec__ = ModuleSpec("faiss", None)
    monkeypatch.setitem(sys.modules, "faiss", broken)
    state = examine_parts()["search on GPUs"]
    assert "libcudart.so.13" in state.detail
    assert state.remedy == "install it again"


@pytest.mark.parametrize(
    ("num", "options", "used", "detail", "remedy"),
    [
        (0, "OPTIMIZE GPU NVIDIA_CUVS ", False, "finds no GPU", "see GPU"),
        (2, "OPTIMIZE GPU NVIDIA_CUVS ", True, "on 2 GPUs", None),
        (
            *(2, "OPTIMIZE GPU ", False, "is built without cuVS"),
            f"uninstall it, then {install_command('gpu')}",
        ),
    ],
)
def test_faiss_for_gpus_is_used_where_collections_are_searched_with_it(
    monkeypatch, num, options, used, detail, remedy
):
    stub(
        monkeypatch,
        "faiss",
        __version__="1.15.1",
        StandardGpuResources=object,
        get_num_gpus=lambda: num,
        get_compile_options=lambda: options,
    )
    monkeypatch.setattr(faiss_module, "faiss", sys.modules["faiss"])
    monkeypatch.setattr(faiss_module, "searches_on_gpus", faiss_module.searches_on_gpus.__wrapped__)
    state = examine_parts()["search on GPUs"]
    assert state == PartState(used, f"FAISS 1.15.1 {detail}", remedy)


def test_beside_torch_faiss_is_told_to_have_the_graphs(monkeypatch):
    torch_of(monkeypatch)
    stub(monkeypatch, "faiss", __version__="1.15.1")
    state = examine_parts()["search on GPUs"]
    assert state.used
    assert state.detail.endswith("graphs and cells: FAISS 1.15.1 is built for CPUs only")
    assert state.remedy == "see GPU"


def test_jpegs_are_decoded_on_a_gpu_by_nvimagecodec(monkeypatch):
    part = "JPEGs on GPUs"
    torch_of(monkeypatch, fault=RuntimeError("Found no NVIDIA driver"))
    assert str(examine_parts()[part]) == "not used: needs a GPU that torch can use (see GPU)"
    torch_of(monkeypatch)
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    missing = examine_parts()[part]
    assert (missing.used, "is not installed" in missing.detail) == (False, True)
    assert missing.remedy.startswith(install_command("train-gpu"))

    opened = []
    decoder = SimpleNamespace(version="0.9.0")
    monkeypatch.setattr(nvimgcodec, "NvDecoder", lambda gpu: opened.append(gpu) or decoder)
    state = examine_parts()[part]
    assert str(state) == "used: nvImageCodec 0.9.0, by data.decode=device in training"
    assert opened == [0]


@pytest.mark.parametrize(
    ("package", "part", "extra"),
    [
        ("torch", "CUDA of torch", "train"),
        ("faiss", "search on GPUs", "serve"),
        ("numba", "compiled loops", "compiled"),
        ("tritonclient", "Triton server", "triton"),
    ],
)
def test_what_is_not_installed_names_its_command(monkeypatch, package, part, extra):
    monkeypatch.setitem(sys.modules, package, None)
    state = examine_parts()[part]
    assert (state.used, state.remedy) == (False, install_command(extra))


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    ready = True

    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=self.ready)


@pytest.mark.parametrize("ready", [True, False])
def test_a_triton_server_is_asked_whether_it_is_ready(ready):
    servicer = Server()
    servicer.ready = ready
    server = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        state = examine_parts(address)["Triton server"]
    finally:
        server.stop(None).wait()
    assert (state.used, state.detail.startswith(address)) == (ready, True)


def test_a_triton_server_that_does_not_answer_is_named(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLCD_TRITON__URL", address)
    printed = call_mlcd("doctor").stdout
    assert f"Triton server  not used: {address} does not answer" in printed
    for wrong in ("http://x/y", "\u00fc"):
        assert not examine_parts(wrong)["Triton server"].used
