"""Pages that are made are up to date, and the site is built without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import qkv_engine
from qkv_engine.cli.main import COMMANDS
from qkv_engine.validation import BOUNDS

from .doc_pages import ROOT

EXPLAINED = [
    *("Engine", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "RequestMetrics", "KVUsage"),
    *("EngineStats", "KVConfig", "RungConfig"),
]


@pytest.fixture(scope="module")
def make_api() -> ModuleType:
    return _program("make_api")


def _program(name: str) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make_api", "make_commands"])
def test_made_pages_are_up_to_date(name: str):
    program = _program(name)
    page = program.PAGE.read_text()
    assert program.fill(page) == page, f"run python docs/{name}.py"


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_option_and_field_is_explained(make_api: ModuleType, name: str):
    kind = getattr(qkv_engine, name)
    explained = [field for entry in make_api.entries(kind) for field in entry.names]
    assert sorted(explained) == sorted(make_api.declarations(kind))
    assert all(entry.meaning.endswith(".") for entry in make_api.entries(kind))
    assert f"<!-- {name} -->" in make_api.PAGE.read_text()


def test_bounds_of_parameters_are_those_checked(make_api: ModuleType):
    meanings = {field: entry.meaning for entry in make_api.entries(qkv_engine.SamplingParams) for field in entry.names}
    for name, bounds in BOUNDS.items():
        if bounds.high <= 1000:
            assert re.search(rf"\b{bounds.high:g}\b", meanings[name]), name


def test_api_page_lists_the_public_names():
    page = (ROOT / "docs/python_api.md").read_text()
    assert [name for name in qkv_engine.__all__ if f"`{name}" not in page and f"<!-- {name} " not in page] == [
        "__version__"
    ]


def test_the_command_page_has_every_command():
    page = (ROOT / "docs/command_line.md").read_text()
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert set(headings) == set(COMMANDS)
    assert headings == re.findall(r"^<!-- (?!end)(\w+) -->$", page, re.MULTILINE)


def test_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path):
    program = Path(sys.executable).with_name("mkdocs")
    words = [program, "build", "--strict", "--config-file", ROOT / "mkdocs.yml", "--site-dir", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    made = {str(path.relative_to(tmp_path).with_suffix(".md")) for path in tmp_path.rglob("*.html")}
    assert made >= {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    for path in tmp_path.rglob("*.html"):
        assert not re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//", path.read_text()), path
