"""Schemathesis over the live API document: what it says is what the server takes and gives."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.running import serving

# All of its checks but one: what the document allows may still be refused (with a status that it
# names). JSON Schema cannot say that bytes are an image, that a tensor is as long as its shape,
# that a vector has the model's dimension, or that a number is within a limit of the running server.
NOT_SAYABLE = "positive_data_acceptance"


def explore(server, num_examples, *options, without=(), timeout_s):
    """without: further checks to leave out."""
    command = [Path(sys.executable).with_name("schemathesis")]
    command += ["--config-file", Path(__file__).with_name("schemathesis.toml")]
    command += ["run", f"{server}/openapi.json"]
    command += [
        "--max-examples",
        str(num_examples),
        "--exclude-checks",
        ",".join((NOT_SAYABLE, *without)),
        "--no-color",
        *options,
    ]
    command += ["--seed", "1", "--generation-deterministic"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd="/tmp"
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


@pytest.fixture(scope="module")
def explored(model_to_change, new_state):
    """Not the server of the other tests: collections and names come and go here."""
    with serving(model_to_change, state_dir=new_state()) as running:
        yield running.url


def test_the_document_is_true(explored):
    explore(explored, 5, "--phases", "examples,coverage,fuzzing", timeout_s=280)


def test_the_document_is_true_of_a_model_that_takes_texts():
    paths = ("--include-path-regex", "texts|classify|embeddings|/v2/embed|labels")
    with serving("fake:text=true,latency_ms=0", engine="fake") as running:
        explore(running.url, 5, "--phases", "examples,coverage,fuzzing", *paths, timeout_s=280)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_document_is_true_at_length(explored):
    explore(explored, 50, timeout_s=1700)
