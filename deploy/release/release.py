"""Builds the files of a release into a new folder, and checks them in environments of their own.

    python deploy/release/release.py dist --sbom .venv-release/bin/cyclonedx-py

The folder holds the wheel, the sdist, an SBOM (CycloneDX) of what `mlcd[serve,starter]` installs
with constraints.txt, and SHA256SUMS. The same commit gives the same bytes: hatchling gives every
file one time, and the SBOM states none. Where there is a Docker engine, the images are built and
tagged with the version, too.
"""

import argparse
import hashlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from PIL import Image

from mlcd.version import __version__

ROOT: Final = Path(__file__).resolve().parents[2]
EXTRAS: Final = "serve,starter"
TOP_LEVEL: Final = {"mlcd", f"mlcd-{__version__}.dist-info"}
IMAGES: Final = ("api", "worker", "api-gpu", "worker-gpu", "train")
COLORS: Final = ("red", "green", "blue", "yellow", "black", "white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sbom", type=Path, required=True, help="the program cyclonedx-py")
    parser.add_argument("--no-images", action="store_true")
    parser.add_argument(
        "--docker-build",
        metavar="ARGUMENTS",
        default="",
        help="more arguments of `docker build`, such as --build-arg=PYTHON_IMAGE=IMAGE",
    )
    options = parser.parse_args()
    if changes := run("git", "status", "--porcelain"):
        sys.exit(f"a release is made of a commit, and these files differ from it:\n{changes}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        files = work / "files"
        wheel = build_packages(files, work)
        python = install(wheel, work / "environment")
        write_sbom(options.sbom, python, files / f"mlcd-{__version__}.cdx.json")
        check_explore(python.parent / "mlcd", work)
        write_checksums(files)
        shutil.rmtree(options.out, ignore_errors=True)
        shutil.copytree(files, options.out)
    print(f"{options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    if options.no_images or shutil.which("docker") is None:
        print("images: not built")
    else:
        build_images(shlex.split(options.docker_build))


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    return subprocess.run(
        command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def build_packages(files: Path, work: Path) -> Path:
    """Builds sdist and wheel, and returns the wheel.

    Exits where the sdist's wheel has other bytes, or the wheel installs packages of other names.
    """
    hatchling = (sys.executable, "-m", "hatchling", "build")
    run(*hatchling, "-d", files)
    (wheel,), (sdist,) = files.glob("*.whl"), files.glob("*.tar.gz")
    shutil.unpack_archive(sdist, work / "sdist", filter="data")
    (unpacked,) = (work / "sdist").iterdir()
    run(*hatchling, "-t", "wheel", "-d", work / "again", cwd=unpacked)
    if (work / "again" / wheel.name).read_bytes() != wheel.read_bytes():
        sys.exit("the wheel built from the sdist differs from the checkout's")
    with zipfile.ZipFile(wheel) as archive:
        if unexpected := {name.split("/")[0] for name in archive.namelist()} - TOP_LEVEL:
            sys.exit(f"the wheel must install {sorted(TOP_LEVEL)} alone, not {sorted(unexpected)}")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    """Installs the wheel into a new environment, and returns its interpreter."""
    run("uv", "venv", "--quiet", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    command = ("uv", "pip", "install", "--quiet", "--python", python)
    run(*command, "-c", ROOT / "constraints.txt", f"mlcd[{EXTRAS}] @ {wheel.as_uri()}")
    for path in environment.rglob("mlcd-*.dist-info/direct_url.json"):
        path.unlink()  # the SBOM would hold the path of this folder
    return python


def write_sbom(program: Path, python: Path, out: Path) -> None:
    project = ROOT / "pyproject.toml"
    run(program, "environment", "--output-reproducible", "--pyproject", project, "-o", out, python)


def check_explore(mlcd: Path, work: Path) -> None:
    """Groups a few pictures by the installed command; exits where it fails."""
    photos = work / "photos"
    photos.mkdir()
    for color in COLORS:
        Image.new("RGB", (64, 48), color).save(photos / f"{color}.png")
    if (version := run(mlcd, "--version", cwd=work)).split()[-1] != __version__:
        sys.exit(f"mlcd --version must end with {__version__}, got {version!r}")
    run(mlcd, "explore", photos, "--once", "--state", work / "state", cwd=work)


def write_checksums(files: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(files.iterdir())
    ]
    (files / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def build_images(arguments: list[str]) -> None:
    labels = {
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.revision": run("git", "rev-parse", "HEAD"),
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.title": "mlcd",
    }
    for target in IMAGES:
        tag = f"mlcd-{target}:{__version__}"
        stated = [f"--label={name}={value}" for name, value in labels.items()]
        subprocess.run(
            ["docker", "build", "--target", target, "--tag", tag, *stated, *arguments, "."],
            cwd=ROOT,
            check=True,
        )
        print(f"image {tag}")


if __name__ == "__main__":
    main()
