"""Starts the Triton server that nvidia-pytriton bundles, with models of `--backend python`.

It listens on loopback and is for development and tests only: the bundled release predates security
fixes of 2025. Run it by the interpreter of the environment that holds it (`make triton`), which the
python backend needs. It uses nothing but the standard library.
"""

import argparse
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final, NoReturn

LOOPBACK: Final = "127.0.0.1"
MIN_GLIBC: Final = (2, 35)
_BAD_USAGE: Final = 2


def main() -> None:
    arguments = _parsed()
    packages = Path(sysconfig.get_path("platlib"))
    bundle = packages / "pytriton" / "tritonserver"
    if reason := unusable(bundle):
        _fail(reason)
    if arguments.check:
        return
    if arguments.repository is None or not arguments.repository.is_dir():
        _fail("give a directory made by `mlcd export --format triton --backend python`")
    libraries = [Path(sysconfig.get_config_var("LIBDIR")), packages / "nvidia_pytriton.libs"]
    # The server gets nothing else of the caller's environment.
    environment = {
        # Our interpreter comes first, else the python backend finds one without numpy.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
        # The backend's stub must load the libpython of this standard library.
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
    }
    command = [str(bundle / "bin" / "tritonserver"), *_options(arguments, backends(bundle))]
    os.execve(command[0], command, environment)  # noqa: S606 - signals must reach the server


def unusable(bundle: Path) -> str | None:
    """Returns in one line why the server cannot run here; None where it can."""
    libc, _, release = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if (
        platform.machine() != "x86_64"
        or libc != "glibc"
        or tuple(map(int, release.split("."))) < MIN_GLIBC
    ):
        return "the bundled Triton server runs on Linux x86-64 with glibc 2.35 or later"
    if not bundle.is_dir():
        return "the bundled Triton server is not installed: make triton"
    if not _stub(bundle).is_file():
        return f"the bundled Triton server has no stub for Python {_python()}"
    library = f"libpython{_python()}.so.1.0"
    if not (Path(sysconfig.get_config_var("LIBDIR")) / library).is_file():
        return (
            f"the bundled Triton server needs {library} (Debian: apt install libpython{_python()})"
        )
    return None


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The bundled Triton server, for development and tests only."
    )
    parser.add_argument(
        "repository", type=Path, nargs="?", help="of `mlcd export --format triton --backend python`"
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether it can run here, by the exit status"
    )
    parser.add_argument("--model", action="append", help="to load at start; default: every one")
    # Triton's own HTTP port, 8000, is the default of `mlcd serve`.
    for name, port in (("http", 8003), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{name}-port", type=int, default=port)
    parser.add_argument(
        "--address", default=LOOPBACK, help="another is for a container on a network of its own"
    )
    return parser.parse_args()


def _options(arguments: argparse.Namespace, backends: Path) -> list[str]:
    ports = {name: getattr(arguments, f"{name}_port") for name in ("http", "grpc", "metrics")}
    return [
        f"--model-repository={arguments.repository.resolve()}",
        f"--backend-directory={backends}",
        # Each server has names of its own in /dev/shm: several may run, and the number identifies
        # what a killed one leaves.
        f"--backend-config=python,shm-region-prefix-name=mlcd-triton-{os.getpid()}-",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in arguments.model or ["*"]),
        "--disable-auto-complete-config",
        "--exit-timeout-secs=5",
        # With four, its default, a version that cannot be loaded has killed the server by signal
        # 11, in 1 load of 50.
        "--model-load-thread-count=1",
        "--allow-gpu-metrics=false",
        *(f"--{name}-address={arguments.address}" for name in ports),
        *(f"--{name}-port={port}" for name, port in ports.items()),
    ]


def backends(bundle: Path) -> Path:
    """Returns the backend directory: the wheel's python backend with this interpreter's stub.

    It is made once.
    """
    final = Path(sys.prefix) / f"triton-backends-{_python()}"
    if not final.is_dir():
        draft = Path(tempfile.mkdtemp(dir=sys.prefix))
        draft.chmod(0o755)
        backend = draft / "python"
        shutil.copytree(
            bundle / "backends" / "python", backend, ignore=shutil.ignore_patterns("__pycache__")
        )
        stub = backend / "triton_python_backend_stub"
        shutil.copyfile(_stub(bundle), stub)
        stub.chmod(0o755)
        try:
            draft.rename(final)
        except OSError:  # another server was first
            shutil.rmtree(draft)
    return final


def _stub(bundle: Path) -> Path:
    return bundle / "python_backend_stubs" / _python() / "triton_python_backend_stub"


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _fail(reason: str) -> NoReturn:
    sys.stderr.write(f"triton: {reason}\n")
    sys.exit(_BAD_USAGE)


if __name__ == "__main__":
    main()
