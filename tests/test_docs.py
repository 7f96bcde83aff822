"""The documentation is true of the code: names, options and links exist, commands parse."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkv_engine.cli.main import _parse

from .doc_pages import DATED, FENCE, PAGES, ROOT, blocks, code_spans, each_current_page, each_page

FOLDERS = "engine|scheduler|kernels|models|planner|cli|bench|serve|cluster|studies|tests|docs|examples"
SOURCES = [path for folder in FOLDERS.split("|") for path in ROOT.glob(f"{folder}/**/*.py") if path != Path(__file__)]
# Names that pages use and that are not ours.
RAY = {"RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"}
MAX_LINES = 400
LONG = {  # files that may be longer, and why
    "engine/kv/table.py": "one class, whose methods share its invariants",
    "studies/train_demo.py": "one script, read from top to bottom",
    "tests/cli/test_plan.py": "one command",
    "tests/engine/test_engine.py": "one class, on one engine",
    "tests/engine/test_faults.py": "one fault a test, on one engine",
}
# Studies that left the tree, which dated notes still name.
CLOSED = re.findall(r"`(studies\.\w+)`", (ROOT / "docs/notes/index.md").read_text())
FOREIGN = {"gpu_memory_utilization", "sampling_params", "HF_HOME", "NO_COLOR", *RAY}


@each_page
def test_links_and_paths_lead_somewhere(page: Path):
    text = FENCE.sub("", page.read_text())
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in link]
    paths = re.findall(rf"`((?:{FOLDERS})/[\w/.]+\.(?:py|md|json|toml))", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    closed = {name.replace(".", "/") + ".py" for name in CLOSED if page in DATED}
    missing += [path for path in paths if path not in closed and not (ROOT / path).exists()]
    assert not missing


@each_page
def test_anchors_are_headings(page: Path):
    for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.*)$", ((page.parent / file) if file else page).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_names_in_files_exist(page: Path):
    for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)", page.read_text()):
        source = (ROOT / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(?:async def|def|class) {part}\b", source, re.MULTILINE), f"{path}:{name}"


def test_architecture_names_its_files():
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", (ROOT / "docs/architecture.md").read_text())) > 20


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Every identifier in the sources and the build files."""
    files = [*SOURCES, ROOT / "pyproject.toml", ROOT / "Makefile"]
    return {word for path in files for word in re.findall(r"[A-Za-z_]\w*", path.read_text())}


@each_current_page
def test_identifiers_are_in_the_code(page: Path, words: set[str]):
    spans = " ".join(code_spans(page))
    named = {
        w for w in re.findall(r"(?<![\w./-])[A-Za-z_]\w*", spans) if "_" in w.strip("_") or re.search(r"[a-z][A-Z]", w)
    }
    assert sorted(named - words - FOREIGN) == []


@pytest.fixture(scope="module")
def definitions() -> tuple[dict[str, set[str]], dict[str, list[set[str]]]]:
    """The members of each class, and the parameters of each function and class of a name."""
    members, parameters = defaultdict[str, set[str]](set), defaultdict[str, list[set[str]]](list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members[node.name] |= _members(node)
                parameters[node.name].append(_members(node) | _arguments(_method(node, "__init__")))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters[node.name].append(_arguments(node))
    return members, parameters


@each_page
def test_members_and_arguments_exist(page: Path, definitions):
    members, parameters = definitions
    for span in code_spans(page):
        for owner, name in re.findall(r"(?<![\w.])([A-Z]\w+)\.([a-z_]\w*)", span):
            assert owner not in members or name in members[owner], span
    calls = [call for span in code_spans(page) for call in _calls(span, with_positional=True)]
    for called, given in calls + [call for code in _snippets(page) for call in _calls(code)]:
        known = parameters.get(called)
        assert known is None or any(given <= names or "**" in names for names in known), (called, given)


@each_current_page
def test_options_are_options(page: Path):
    files = [*SOURCES, ROOT / "Makefile", ROOT / "docs/command_line.md"]  # the page is made from the parsers
    known = {word for path in files for word in re.findall(r"--[a-z][\w-]+", path.read_text())}
    foreign = {
        "--head",
        "--query-gpu",
        "--loop-ms",
        "--build-arg",
        "--gpus",
        "--rm",
        "--durations",
    }  # of ray, nvidia-smi, docker, pytest
    foreign |= {"--model", "--model_args"}  # of lm_eval
    assert not set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text())) - known - foreign


@each_page
def test_command_lines_parse(page: Path):
    lines = [words for words in _commands(page) if words[0] == "qkv-engine"]
    for line in [*lines, *_command_spans(page)]:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                _parse(line[1:])
            except SystemExit as leaving:  # --help
                assert leaving.code == 0, line


def test_command_lines_are_found():
    assert len([words for page in PAGES for words in _commands(page) if words[0] == "qkv-engine"]) >= 40


@each_page
def test_programs_targets_and_tests_that_are_run_exist(page: Path):
    for program, *words in _commands(page):
        if program == "python" and words[0] == "-m":
            assert _is_module(words[1], page), words
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        else:
            paths = [word.split("::")[0] for word in words if word.startswith(("tests/", "docs/"))]
            assert all((ROOT / path).exists() for path in paths), words
    for name in re.findall(r"python -m ((?:qkv_engine|studies)[\w.]*)", page.read_text()):
        assert _is_module(name, page), name


def test_closed_studies_are_gone():
    assert CLOSED and not [name for name in CLOSED if importlib.util.find_spec(name)]


def test_nothing_is_installed_by_its_name():
    """The project is on no package index: a name there may be a stranger's."""
    texts = {path: path.read_text() for path in [*PAGES, *SOURCES]}
    assert [path for path, text in texts.items() if re.search(r"pip install\b[^\n]*['\" ]qkv[-_]engine", text)] == []


def test_files_are_short():
    """At most ``MAX_LINES``, as CONTRIBUTING asks."""
    long = {str(p.relative_to(ROOT)) for p in SOURCES if len(p.read_text().splitlines()) > MAX_LINES}
    assert not long - LONG.keys()


def test_readme_counts_lines():
    """Within a tenth: the figures are round."""
    core, kernels = re.search(
        r"is ([\d,]+) lines of\s+Python, the kernels ([\d,]+) more", (ROOT / "README.md").read_text()
    ).groups()
    counts = {
        folder: sum(len(path.read_text().splitlines()) for path in ROOT.glob(f"{folder}/**/*.py"))
        for folder in FOLDERS.split("|")
    }
    assert int(core.replace(",", "")) == pytest.approx(
        counts["engine"] + counts["scheduler"] + counts["models"], rel=0.1
    )
    assert int(kernels.replace(",", "")) == pytest.approx(counts["kernels"], rel=0.1)


def _is_module(name: str, page: Path) -> bool:
    """True if ``name`` is a module, or a closed study on a page that speaks of then."""
    return bool(importlib.util.find_spec(name)) or (page in DATED and name in CLOSED)


def _snippets(page: Path) -> list[str]:
    """Python code blocks of a page that are no parts of our files."""
    return [block.code for block in blocks(page) if block.language == "python" and not block.quoted_file]


def _commands(page: Path) -> list[list[str]]:
    """The words of all commands in code blocks."""
    return [words for block in blocks(page) if block.has_commands for words in block.commands()]


def _command_spans(page: Path) -> Iterator[list[str]]:
    """The words of inline code that begins with our command, with optional parts given."""
    for span in code_spans(page):
        if span.startswith("qkv-engine "):
            line = re.sub(r"\|\w+", "", span.translate(str.maketrans("", "", "[]"))).replace("COMMAND", "chat")
            yield shlex.split(line)


def _calls(code: str, *, with_positional: bool = False) -> list[tuple[str, set[str]]]:
    """Calls in a piece of code: the function's name, and the names of arguments; none in what is no code.

    In ``f(x, y)`` on a page x and y name parameters; in a program they are variables.
    """
    found = list[tuple[str, set[str]]]()
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                positional = {a.id for a in node.args if isinstance(a, ast.Name)} if with_positional else set()
                found.append((name, positional | {k.arg for k in node.keywords if k.arg}))
    return found


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes of a class, without those of its bases."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.add(child.target.id)
        elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "self":
            found.add(child.attr)
    return found


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == name), None)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | None) -> set[str]:
    """Parameters of a function; "**" stands for any others."""
    if node is None:
        return set()
    names = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    return names | {"**"} if node.args.kwarg else names
