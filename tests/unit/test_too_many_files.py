"""Commands with few descriptors: they work, or say in one line that there are too few."""

import os
import resource

import pytest

from mlcd.too_many_files import is_too_many_files
from tests.conftest import run_mlcd, write_digits
from tests.image_host import ImageHost, ok


def with_descriptors(num, *arguments, **options):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (num, num))

    return run_mlcd(*arguments, preexec_fn=limit, **options)


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_server_and_a_worker_say_how_many_they_need(command, tmp_path):
    jobs = {"MLCD_STATE_DIR": str(tmp_path), "MLCD_JOBS__ROOTS": str(tmp_path)}
    refused = with_descriptors(24, command, "--model", "pixels", env=os.environ | jobs)
    assert refused.returncode == 2
    said = "mlcd: at least 64 open files are required, and the limit is 24"
    assert refused.stderr == f"{said}: raise the limit with `ulimit -n 4096`\n"


@pytest.mark.parametrize("num", [5, 24])
def test_a_command_works_or_says_so_in_one_line(num, tmp_path):
    write_digits(tmp_path / "images", 20)
    ended = with_descriptors(
        num, "embed", tmp_path / "images", tmp_path / "out", "--model", "pixels"
    )
    assert "Traceback" not in ended.stderr
    if ended.returncode:
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert "ulimit -n" in ended.stderr
    assert (ended.returncode == 0) == (num == 24), ended.stderr


def test_images_that_no_descriptor_was_free_for_are_not_said_to_be_out_of_reach(tmp_path):
    """Their hosts are not to blame, and nothing is left out of the output for it."""
    write_digits(tmp_path / "images", 20)
    images = sorted((tmp_path / "images").rglob("*.png"))
    answers = {f"/{number}": ok(path.read_bytes()) for number, path in enumerate(images)}
    with ImageHost({}) as host:
        host.answers |= {path: slowly(host, answer) for path, answer in answers.items()}
        (tmp_path / "urls.txt").write_text("\n".join(host.url + path for path in answers))
        ended = with_descriptors(
            16,
            *("embed", tmp_path / "urls.txt", tmp_path / "out", "--model", "pixels"),
            *("--url-hosts", "127.0.0.1", "--url-networks", "127.0.0.0/8"),
            *("--url-ports", host.port),
        )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "too many open files" in ended.stderr


def slowly(host, answer):
    return lambda connection: (host.wait(0.3), connection.sendall(answer))


def test_what_led_to_an_error_is_looked_at_too():
    def fail(error, cause):
        try:
            raise error from cause
        except type(error) as raised:
            return raised

    full = OSError(24, os.strerror(24))
    assert is_too_many_files(fail(ImportError("x"), fail(RuntimeError("y"), full)))
    assert is_too_many_files(ExceptionGroup("z", [ValueError("x"), full]))
    assert not is_too_many_files(fail(ImportError("x"), OSError(2, "No such file")))
