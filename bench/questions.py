"""Questions with one right answer each, of the demo tasks or a file, and how they are put to an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from qkv_engine.errors import ConfigError
from qkv_engine.request import SamplingParams
from qkv_engine.tokenizer import Tokenizer

from .grading import Example, sample_examples
from .tasks import TASKS

DEFAULT_SIZES = {"ledger": 40, "lookup": 100, "addition": 10, "subtraction": 2, "multiplication": 12, "sorting": 40}
OPEN_END_TOKENS = 512  # output allowed where no right reply says how long one is
SLACK_SHARE, SLACK_TOKENS = 0.1, 16  # what a right reply may be longer than the known one


class Task(NamedTuple):
    """A named set of questions; ``size`` is the difficulty of a demo task, None for a file."""

    name: str
    size: int | None
    examples: tuple[Example, ...]

    @property
    def label(self) -> str:
        return self.name if self.size is None else f"{self.name} {self.size}"


class Ask(NamedTuple):
    """A question as an engine takes it: prompt tokens, and greedy parameters that stop a little after a right reply."""

    prompt: list[int]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it may need: the last one sampled is never read."""
        return len(self.prompt) + (self.params.max_tokens or 1) - 1


class Workload(NamedTuple):
    """The questions of a task, ready to be asked."""

    task: Task
    asks: list[Ask]

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the longest of them may need."""
        return max(ask.num_tokens for ask in self.asks)


def parse_tasks(text: str, *, samples: int, seed: int = 0) -> tuple[Task, ...]:
    """The demo tasks of "ledger:40,lookup" (no size: a usual one), ``samples`` questions each; the same for a seed.

    Raises ``ConfigError`` for an unknown task or an impossible size.
    """
    wanted: dict[tuple[str, int], None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)\s*(?::\s*(\d{1,4})\s*)?", part, re.ASCII)
        name = match[1] if match else part.strip()
        if match is None or name not in TASKS or match[2] == "0":
            remedy = f'Give a list such as "ledger:40,lookup": names from {", ".join(TASKS)}, sizes from 1'
            raise ConfigError("not a task", field="tasks", value=part.strip(), remedy=remedy)
        wanted[name, int(match[2]) if match[2] else DEFAULT_SIZES[name]] = None
    return tuple(Task(name, size, tuple(sample_examples(name, size, samples, seed))) for name, size in wanted)


def read_questions(path: Path, *, samples: int) -> Task:
    """The first ``samples`` lines of a JSONL file of objects with "prompt" and "answer", and "reply" if it is known.

    Raises ``ConfigError`` for any other line, or none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field="data", value=str(path)) from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise ConfigError("has no questions", field="data", value=str(path))
    return Task(path.stem, None, tuple(_parse_question(path, number, line) for number, line in filled[:samples]))


def _parse_question(path: Path, number: int, line: str) -> Example:
    try:
        found = json.loads(line)
        fields = [found["prompt"], found["answer"], found.get("reply", "")]
    except (ValueError, TypeError, KeyError, AttributeError):
        fields = [None]
    if not all(isinstance(value, str) for value in fields):
        remedy = 'Give one object a line: {"prompt": "...", "answer": "..."}, both strings'
        raise ConfigError(f"line {number} is no question", field="data", value=str(path), remedy=remedy)
    prompt, answer, reply = fields
    return Example(path.stem, 0, prompt, answer.strip(), "", reply)


def ask(tokenizer: Tokenizer, examples: Sequence[Example], *, max_tokens: int | None = None) -> list[Ask]:
    """``examples`` as requests. ``max_tokens`` is for all of them; None: a little more than the right reply has."""
    asks = []
    for example in examples:
        limit = max_tokens or _reply_limit(tokenizer, example.reply)
        # A chain of thought stands between special tokens, which the grader has to see.
        params = SamplingParams(temperature=0.0, max_tokens=limit, skip_special_tokens=False)
        asks.append(Ask(_prompt_ids(tokenizer, example.prompt), params))
    return asks


def _prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    return tokenizer.chat_prompt([{"role": "user", "content": prompt}])[1]


def _reply_limit(tokenizer: Tokenizer, reply: str) -> int:
    if not reply:
        return OPEN_END_TOKENS
    num_tokens = len(tokenizer.encode(reply, add_special_tokens=False))
    return int((1 + SLACK_SHARE) * num_tokens) + SLACK_TOKENS
