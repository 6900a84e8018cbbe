"""The wheel holds the build of the page's sources that it is packed with, and no build needs node
where that is so.
"""

import hashlib
import importlib.util
import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "mlcd/service/http/explorer"
BUILT = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(tmp_path):
    """A copy of the page's folder; its tools are those of the checkout."""
    copy = tmp_path / "explorer"
    shutil.copytree(ROOT / PAGE, copy, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    return copy


def sums(folder, paths):
    """Returns what sha256sum prints."""
    return "".join(
        f"{hashlib.sha256((folder / path).read_bytes()).hexdigest()}  {path}\n"
        for path in sorted(paths, key=Path)
    )


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_wheel_holds_the_build_of_the_sources_it_is_packed_with(hook, tmp_path, monkeypatch):
    from hatchling.build import build_wheel

    stated = (ROOT / PAGE / "static" / "SOURCE.sha256").read_text()
    source = [
        path.relative_to(ROOT / PAGE).as_posix() for path in (ROOT / PAGE / "src").rglob("*.*")
    ]
    assert f"{digest(sums(ROOT / PAGE, [*BUILT, *source]))}  sources" in stated, "run make explorer"
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm
    with ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        packed = {
            name.removeprefix(f"{PAGE}/"): wheel.read(name)
            for name in wheel.namelist()
            if name.startswith(f"{PAGE}/")
        }
    built = {name.removeprefix("static/"): packed[name] for name in packed if "static/" in name}
    assert built.pop("SOURCE.sha256").decode() == stated
    for name, content in built.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert f"{digest(sums(tmp_path, built))}  build" in stated
    assert {name for name in packed if "static/" not in name} == {"__init__.py", "page.py"}


@pytest.mark.parametrize("changed", ["src/main.tsx", "static/index.html"])
def test_other_sources_or_another_build_without_npm_are_one_clear_error(
    hook, page, changed, monkeypatch
):
    hook.ensure_built(page)  # agrees as it is
    with (page / changed).open("a") as file:
        file.write("\n")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"npm is not on the PATH to build it: install Node"):
        hook.ensure_built(page)


def test_the_committed_build_is_what_the_sources_give(page):
    tools = ROOT / PAGE / "node_modules"
    npm = shutil.which("npm")
    if npm is None or not tools.is_dir():
        pytest.skip("npm, or what it installs, is not at hand")
    shutil.rmtree(page / "static")
    (page / "node_modules").symlink_to(tools)
    command = [npm, "run", "build"]
    built = subprocess.run(command, cwd=page, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    committed = ROOT / PAGE / "static"
    paths = {path.relative_to(committed) for path in committed.rglob("*.*")}
    assert {path.relative_to(page / "static") for path in (page / "static").rglob("*.*")} == (
        paths - {Path("SOURCE.sha256")}
    )
    for path in paths - {Path("SOURCE.sha256")}:
        assert (page / "static" / path).read_bytes() == (committed / path).read_bytes(), path


def test_the_page_is_small():
    import gzip

    static = ROOT / PAGE / "static"
    packed = sum(len(gzip.compress(path.read_bytes())) for path in static.rglob("*.*"))
    assert packed < 60_000, "the page is for slow lines, too"
