"""Commands and snippets of the documentation are run, and print what the pages say; the others give a reason."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkv_engine import Engine
from qkv_engine.cli.main import COMMANDS, main
from qkv_engine.kv_store.store import KVStore

from .doc_pages import PAGES, ROOT, Block, blocks, each_page
from .engine.kv_store.pieces import NAMESPACE, SMALL, put

REASONS = {
    *("needs a GPU", "needs the Hub", "needs a terminal", "needs a key", "takes minutes"),
    *("installs packages", "make test runs it", "tests/serve runs it", "tests/cluster runs it"),
}
# Added to commands with an option or a name, the first that is there, so that they end in seconds: few, short questions
# and texts. Commands with output shown run as they are.
FEWER = {
    "--from": [],
    "--compare": [],
    "--arrivals": ["--task", "addition:4", "--requests", "2"],
    "--divergence": ["--tasks", "addition:4", "--samples", "1"],
    "--perplexity": ["--context", "64", "--stride", "32"],
    "eval": ["--tasks", "addition:4", "--samples", "1", "--max-tokens", "32"],
    "plan": ["--task", "addition:10", "--samples", "1"],
    "bench": ["--batch-sweep", "1,2", "--repeats", "1", "--output-len", "16"],
}


# Together they run every command of the program, and the API; make test-full runs the blocks of the other pages.
MAIN = {
    *("README.md", "command_line.md", "python_api.md", "kv_cache.md", "kv_store.md", "determinism.md"),
    *("reliability.md", "xquant.md"),
}
each_page_at_length = pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in MAIN else pytest.mark.slow) for page in PAGES],
    ids=lambda path: str(path.relative_to(ROOT)),
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each page has a folder of its own, and leaves the program's logging as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Sort: 5 99 23 11. What is 47*86? " * 20)
    with KVStore(tmp_path / "kv-store", SMALL, NAMESPACE) as store:
        put(store, 1)
    (tmp_path / "mine.jsonl").write_text('{"text": "Sort: 5 99 23 11. What is 47*86?"}\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 12+30?\n"))
    logger = logging.getLogger("qkv_engine")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, logger.level = before


@each_page
def test_blocks_name_their_language_and_why_they_are_not_run(page: Path):
    for block in blocks(page):
        assert block.language in {"python", "sh", "console", "text", "json"}, block.code
        assert block.not_run is None or block.not_run.split(",")[0] in REASONS, block.not_run


@each_page_at_length
def test_commands_run(page: Path, capsys: pytest.CaptureFixture[str]):
    for block in _commands_to_run(page):
        printed = ""
        for program, *words in block.commands():
            assert program == "qkv-engine", f"put <!-- not run: REASON --> before the block with {program}"
            fewer = [] if block.output() else next((FEWER[word] for word in FEWER if word in words), [])
            assert main([*words, *fewer]) == 0, capsys.readouterr().err
            printed += capsys.readouterr().out
        assert set(map(_plain, block.output())) <= set(map(_plain, printed.splitlines()))


def test_every_command_of_the_program_is_run():
    lines = {page: [words for block in _commands_to_run(page) for words in block.commands()] for page in PAGES}
    of_main = {words[1] for page in PAGES if page.name in MAIN for words in lines[page]}
    assert of_main == set(COMMANDS) - {"serve"}  # which tests/serve runs
    assert sum(map(len, lines.values())) >= 20


@each_page_at_length
def test_snippets_run(page: Path):
    """In order, with the names of those before; where a comment shows what is printed it is."""
    shown, expected = io.StringIO(), list[str]()
    with contextlib.redirect_stdout(shown), _names() as names:
        for block in _snippets_to_run(page):
            exec(compile(block.code, page.name, "exec"), names)
            expected += re.findall(r"(?:print\(.*\)|end=\"\".*\))  # (\d[\d ]*)$", block.code, re.MULTILINE)
    printed = shown.getvalue().splitlines()
    assert [line for line in expected if line not in printed] == []


def test_snippets_of_the_main_pages_are_run():
    pages = {page.name for page in PAGES if _snippets_to_run(page)}
    assert {"README.md", "python_api.md", "kv_cache.md", "xquant.md", "reliability.md"} <= pages


@each_page
def test_quotes_are_those_of_the_files(page: Path):
    for block in blocks(page):
        if block.quoted_file:
            assert block.code.split("\n", 1)[1] in (ROOT / block.quoted_file).read_text(), block.code


@pytest.mark.parametrize("page", ["format", "model", "kernel"])
def test_worked_examples_quote_tested_code(page: str):
    quotes = [block.quoted_file for block in blocks(ROOT / f"docs/adding_a_{page}.md")]
    assert len([path for path in quotes if path]) >= 4


def _commands_to_run(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.has_commands and not block.not_run]


def _snippets_to_run(page: Path) -> list[Block]:
    return [b for b in blocks(page) if b.language == "python" and not b.not_run and not b.quoted_file]


def _plain(line: str) -> str:
    """A printed line without its measured numbers and the width of its columns."""
    return " ".join(re.sub(r"\d[\d,]*\.\d+", "#", line).split())


@contextlib.contextmanager
def _names() -> Iterator[dict[str, object]]:
    """Names for the snippets of a page, whose engines are closed in the end."""
    names: dict[str, object] = {}
    try:
        yield names
    finally:
        for value in names.values():
            if isinstance(value, Engine):
                value.close()
