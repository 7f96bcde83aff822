"""Hooks of mkdocs: the pages of the repository's root are pages of the site, README its start page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.name: "index.md" if path.name == "README.md" else path.name.lower() for path in ROOT.glob("*.md")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root, whose links into ``docs/`` become links beside them."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the root into links to their pages, and bars that GitHub wants escaped into bars."""
    for source, page in PAGES.items():
        markdown = markdown.replace(f"../{source}", page).replace(f"]({source}", f"]({page}")
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), markdown)
