import os
import shutil
from contextlib import nullcontext

import pytest

from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ArtifactInvalid
from tests.conftest import run_python

_ENCODER = """
import faulthandler, os, signal, sys
faulthandler.enable()  # gives signal handlers a stack of their own, as pytest does
import numpy as np
import openvino as ov
from openvino import opset13
from mlcd.encoders.openvino import OpenVinoEncoder, core
from mlcd.images.transform import PreprocessSpec

def encoder(num_threads=0):
    images = opset13.parameter([-1, 3, 4, 4], np.uint8)
    rows = opset13.reshape(opset13.convert(images, "f32"), np.array([0, 48]), special_zero=True)
    model = ov.Model([rows], [images])
    spec = PreprocessSpec(4, 4)
    return OpenVinoEncoder(
        model, name="m", fingerprint="", preprocess=spec, num_threads=num_threads
    )
"""
_SIGNAL = """
opened = [encoder() for _ in range(3)]
while opened:
    opened.pop(0).close()  # in the order in which they were opened
assert core() is core()
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(0 if heard else 3)
"""


def test_a_signal_finds_its_stack_after_encoders_were_closed_in_any_order():
    done = run_python(_ENCODER + _SIGNAL, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_an_engine_with_some_of_the_threads_is_bound_to_no_core():
    """Else two processes with one thread each share the first core: they were no faster
    than one.
    """
    code = (
        "model = encoder(num_threads=1)._compiled.request.get_compiled_model()\n"
        'print(model.get_property("ENABLE_CPU_PINNING"))'
    )
    result = run_python(_ENCODER + code)
    assert result.stdout.strip() == "False"


def test_openvino_reports_nothing_to_its_maker():
    code = (
        "import sys, mlcd.encoders.openvino; print(sys.modules['openvino_telemetry'], 'openvino' "
        "in sys.modules)"
    )
    result = run_python(code)
    assert result.stdout.split() == ["None", "True"]


@pytest.mark.parametrize(
    ("name", "refused"),
    [("model.onnx", True), ("preprocess.json", True), ("model.safetensors", False)],
)
def test_damage_is_refused_in_every_file_that_the_engine_reads(name, refused, journey, tmp_path):
    model = shutil.copytree(journey / "model", tmp_path / "model")
    content = bytearray((model / name).read_bytes())
    content[len(content) // 2] ^= 1
    (model / name).write_bytes(content)
    expected = pytest.raises(ArtifactInvalid, match=f"{name} differs") if refused else nullcontext()
    with expected:
        open_encoder(str(model), EncoderOptions(engine="openvino")).close()
