"""The documentation's pages as tests read them: code blocks, why some are not run, commands, quotes of files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))]
FENCE = re.compile(r"(?:^<!-- not run: ([^\n]*?) -->\n+)?^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = ("qkv-engine", "make", "pytest", "python", "pip")
# bash itself reads the commands of a page, loops and variables included; each program only prints its words.
RECORDER = f"""
PATH=
record() {{ printf '%s\\x1f' "$@"; printf '\\x1e'; }}
for program in {" ".join(PROGRAMS)}; do eval "$program() {{ record $program \\"\\$@\\"; }}"; done
"""

DATED = [page for page in PAGES if page.parent.name == "notes" and page.name != "index.md"]


def _each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda path: str(path.relative_to(ROOT)))


each_page = _each(PAGES)
each_current_page = _each([page for page in PAGES if page not in DATED])  # dated notes speak of the code as it was


class Block(NamedTuple):
    """A fenced block of a page; ``not_run`` is the reason of the comment ``<!-- not run: ... -->`` before it."""

    language: str
    code: str
    not_run: str | None

    @property
    def has_commands(self) -> bool:
        return self.language in ("sh", "console")

    @property
    def quoted_file(self) -> str | None:
        """Path in the first line of a block that is a part of a file."""
        found = re.match(r"# ([\w/]+/\w+\.py)\n", self.code) if self.language == "python" else None
        return found and found[1]

    def commands(self) -> list[list[str]]:
        """The words of each command."""
        lines = self.code.splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        script = RECORDER + "\n".join(lines)
        recorded = subprocess.run(["bash", "-c", script], cwd=ROOT / "docs", capture_output=True, text=True).stdout
        return [words.split("\x1f")[:-1] for words in recorded.split("\x1e")[:-1]]

    def output(self) -> list[str]:
        """Lines that a console shows after its commands, without those that leave something out."""
        if self.language != "console":
            return []
        return [line for line in self.code.splitlines() if line.strip() and not line.startswith(("$ ", "..."))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page in order."""
    return [Block(language, code, reason or None) for reason, language, code in FENCE.findall(page.read_text())]


def code_spans(page: Path) -> list[str]:
    """Inline code of a page."""
    text = FENCE.sub("", page.read_text())
    return [span.replace(r"\|", "|") for span in re.findall(r"`([^`\n]+)`", text)]
