"""The texts that the judge reads, and those that plans are profiled on: demo tasks, or lines of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qkv_engine.bench.divergence import file_texts, task_texts
from qkv_engine.bench.forced import ForcedText
from qkv_engine.bench.questions import parse_tasks, read_lines
from qkv_engine.text.tokenizer import Tokenizer

DEMO = "demo"
ROOT = Path(__file__).resolve().parents[1]
# The second four are the first harder, or another kind: at 16 bits and at 4 the first have nothing left to tell.
EXAM = "ledger:40,lookup:100,addition:10,sorting:40,addition:16,sorting:55,chat:70"
LONG, LONG_SHARE = "ledger:150", 4  # of 4,000 tokens a text: a fourth as many questions
LIKE, UNLIKE = "ledger:40,lookup:100,addition:10,sorting:40", "multiplication:12,subtraction:2"
PIECE_CHARS = 6000  # of a text that is cut out of the checkout's pages: some 1,500 tokens
OWN, OTHER = "like these", "unlike"  # texts of a profile, beside those that are judged


@dataclass(frozen=True)
class Material:
    """What is read. ``sets`` takes a tokenizer and the most tokens of a text, and gives the texts by set.

    ``profiles``: words for ``qkv-engine plan`` that name texts like those, and unlike ones, never the same ones.
    """

    settings: str
    seed: int
    has_replies: bool
    profiles: Mapping[str, list[str]]
    sets: Callable[[Tokenizer, int], dict[str, list[ForcedText]]]


def material_for(model: str, work: Path, *, data: Path | None, samples: int, seed: int) -> Material:
    """Demo tasks for the demo model; for another one, and with ``data``, lines of text, written to ``work``."""
    if model == DEMO and data is None:
        return _of_tasks(samples, seed)
    return _of_lines(work, data, samples, seed)


def _of_tasks(samples: int, seed: int) -> Material:
    few = max(1, samples // LONG_SHARE)
    tasks = (*parse_tasks(EXAM, samples=samples, seed=seed), *parse_tasks(LONG, samples=few, seed=seed))

    def sets(tokenizer: Tokenizer, max_tokens: int) -> dict[str, list[ForcedText]]:
        return {task.label: task_texts(tokenizer, task) for task in tasks}

    profiles = {OWN: ["--task", LIKE], OTHER: ["--task", UNLIKE]}
    settings = f"{samples} questions a task, {few} of {LONG.replace(':', ' ')}, seed {seed}"
    return Material(settings, seed, True, profiles, sets)


def _of_lines(work: Path, data: Path | None, samples: int, seed: int) -> Material:
    """Every other line is read by the judge, the lines between are for plans; program text is the unlike one."""
    found = _pages() if data is None else [line.decode() for _, line in read_lines(data)]
    files = {name: work / f"{name}.jsonl" for name in ("judged", "like", "unlike")}
    parts = {"judged": found[::2], "like": found[1::2], "unlike": _pieces(sorted(ROOT.glob("*/*.py")))}
    for name, lines in parts.items():
        files[name].write_text("\n".join(lines) + "\n", "utf-8")
    name = "the pages of this checkout" if data is None else data.name

    def sets(tokenizer: Tokenizer, max_tokens: int) -> dict[str, list[ForcedText]]:
        return {"texts": file_texts(tokenizer, files["judged"], samples=samples, max_tokens=max_tokens)}

    profiles = {OWN: ["--data", str(files["like"])], OTHER: ["--data", str(files["unlike"])]}
    return Material(f"{samples} texts of {name}", seed, False, profiles, sets)


def _pages() -> list[str]:
    return _pieces([ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))])


def _pieces(paths: Iterable[Path]) -> list[str]:
    """The files as lines of {"text": ...}, whole pieces of ``PIECE_CHARS`` characters."""
    texts = [path.read_text("utf-8") for path in paths]
    starts = ((text, i) for text in texts for i in range(0, len(text) - PIECE_CHARS, PIECE_CHARS))
    return [json.dumps({"text": text[i : i + PIECE_CHARS]}) for text, i in starts]
