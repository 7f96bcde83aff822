"""The wheel and the source archive: complete, without the studies, and at work in an environment of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import qkv_engine

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, ROOTS = SETTINGS["project"], SETTINGS["tool"]["setuptools"]["package-dir"]
NAMING_THE_REPOSITORY = ("SECURITY.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")
DEMO = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "results")


def call(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, of a copy of this checkout."""
    folder = tmp_path_factory.mktemp("release")
    source = shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    call(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})", cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that pip builds of the source archive."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    call(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=sdist.parent)
    (built,) = sdist.parent.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """An environment with the wheel, which finds its dependencies, but not this checkout, where the tests find them."""
    folder = wheel.parent / "env"
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    options = ["--no-deps", "--no-index", "--quiet"]
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    # Folders that a .pth file names come last on the path; .pth files in them, as of editable installs, are not read.
    here = [folder for folder in sys.path if Path(folder).name.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(here) + "\n")
    return folder


def test_wheel_has_all_modules_and_nothing_else(wheel: Path) -> None:
    expected = {"qkv_engine/py.typed", *(f"qkv_engine/assets/demo/{name}" for name in DEMO)}
    expected |= {f"qkv_engine/serve/page/{path.name}" for path in (ROOT / "serve/page").glob("*.*")}
    for package, folder in ROOTS.items():
        modules = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py"))
        expected |= {(Path(*package.split(".")) / module).as_posix() for module in modules}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_source_archive_has_no_tests_studies_and_pages(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {*ROOTS.values(), "qkv_engine.egg-info"}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names


def test_version_is_that_of_the_package(sdist: Path, wheel: Path) -> None:
    assert sdist.name == f"qkv_engine-{qkv_engine.__version__}.tar.gz"
    assert wheel.name.startswith(f"qkv_engine-{qkv_engine.__version__}-py3-none-any")
    assert f"## [{qkv_engine.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_index_page_leads_to_files_of_the_repository(wheel: Path) -> None:
    """Its links are absolute, and those into the repository name files that are there."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    page = archive.read(name).decode()
    repository = PROJECT["urls"]["Repository"]
    assert f"Project-URL: Repository, {repository}" in page and "Description-Content-Type: text/markdown" in page
    pictures, links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page), re.findall(r"(?<!!)\[[^\]]*\]\(([^)#]*)", page)
    assert len(pictures) >= 2 and len(links) >= 20
    raw = repository.replace("github.com", "raw.githubusercontent.com")
    for link, prefix in [*((p, f"{raw}/main/") for p in pictures), *((k, f"{repository}/blob/main/") for k in links)]:
        assert link.startswith(prefix) and (ROOT / link.removeprefix(prefix)).is_file(), link


def test_one_repository_is_named_everywhere() -> None:
    repository = PROJECT["urls"]["Repository"]
    assert all(url.startswith(repository) for url in PROJECT["urls"].values())
    for path in NAMING_THE_REPOSITORY:
        found = set(re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / path).read_text()))
        assert found == {repository}, path


def test_dependencies_have_no_upper_bound_on_torch() -> None:
    assert "torch>=2.10" in PROJECT["dependencies"]


@pytest.mark.slow
def test_installed_wheel_answers(installed: Path) -> None:
    program = installed / "bin/qkv-engine"
    home = call(installed / "bin/python", "-c", "import qkv_engine; print(qkv_engine.__file__)", cwd=installed)
    assert Path(home).is_relative_to(installed)
    assert call(program, "--version", cwd=installed) == f"qkv-engine {qkv_engine.__version__}"
    assert call(program, "chat", "-p", "What is 47*86?", cwd=installed) == "4042"
