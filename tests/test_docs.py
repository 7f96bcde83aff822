"""The documentation names things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "engine|scheduler|kernels|models|cli|bench|tests|docs"
DOCS = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(page: Path):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in link]
    paths = re.findall(rf"`((?:{FOLDERS})/[\w/.]+\.(?:py|md|json|toml))", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_architecture_names_exist():
    names = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / "docs/architecture.md").read_text())
    assert len(names) > 20
    for path, name in names:
        source = (ROOT / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(?:async def|def|class) {part}\b", source, re.MULTILINE), f"{path}:{name}"
