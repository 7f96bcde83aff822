"""Questions with one right answer each, of the demo tasks or a file, and how they are put to an engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from qkv_engine.errors import ConfigError
from qkv_engine.input_files import read_input
from qkv_engine.request import SamplingParams
from qkv_engine.text.tokenizer import Tokenizer

from .grading import Example, Purpose, sample_examples, task_names
from .tasks import Turn

DEFAULT_SIZES = {
    **{"ledger": 40, "lookup": 100, "addition": 10, "subtraction": 2, "multiplication": 12, "sorting": 40},
    "chat": 70,
}
OPEN_END_TOKENS = 512  # output allowed where no right reply says how long one is
MAX_FILE_NBYTES = 64 * 2**20  # of a file of questions, which is read whole
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
    """A question as an engine takes it: prompt tokens, and greedy parameters that stop a little after a right reply.

    ``num_first`` tokens of the prompt are the conversation's first message, or all of it where there is one alone.
    """

    prompt: list[int]
    params: SamplingParams
    num_first: int

    @property
    def judged(self) -> SamplingParams:
        """``params`` for a measurement of accuracy: blocks step down at once, as after any wait in service.

        Messages behind the first are read through the stored KV, as they are where the prefix cache has what was said.
        """
        return replace(self.params, num_prefill_tokens=self.num_first)

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


def parse_tasks(
    text: str, *, samples: int, seed: int = 0, field: str = "tasks", purpose: Purpose = Purpose.EXAM
) -> tuple[Task, ...]:
    """The demo tasks of "ledger:40,lookup" (no size: a usual one), ``samples`` questions each; the same for a seed.

    Raises ``ConfigError``, naming ``field``, for an unknown task or an impossible size.
    """
    wanted: dict[tuple[str, int], None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)\s*(?::\s*(\d{1,4})\s*)?", part, re.ASCII)
        name = match[1] if match else part.strip()
        if match is None or name not in task_names() or match[2] == "0":
            near = [f"Did you mean {found}? " for found in get_close_matches(name, task_names(), n=1) if found != name]
            names = ", ".join(task_names())
            remedy = "".join(near) + f'Give a list such as "ledger:40,lookup": names from {names}, sizes from 1'
            raise ConfigError("not a task", field=field, value=part.strip(), remedy=remedy)
        wanted[name, int(match[2]) if match[2] else DEFAULT_SIZES[name]] = None
    return tuple(Task(name, size, tuple(sample_examples(name, size, samples, seed, purpose))) for name, size in wanted)


class _Question(msgspec.Struct):
    """A line of a file of questions; other fields are passed over."""

    prompt: str
    answer: str
    reply: str = ""


def read_questions(path: Path, *, samples: int) -> Task:
    """The first ``samples`` lines of a JSONL file of objects with "prompt" and "answer", and "reply" if it is known.

    Raises ``ConfigError`` for any other line, for none, and for anything but a regular file of at most 64 MiB.
    """
    lines = read_lines(path)[:samples]
    return Task(path.stem, None, tuple(_parse_question(path, number, line) for number, line in lines))


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """Number and content of each line of the file ``--data`` that is not blank.

    Raises ``ConfigError`` for a file without any, and for anything but a regular file of at most 64 MiB.
    """
    lines = enumerate(read_input(path, field="data", max_nbytes=MAX_FILE_NBYTES).split(b"\n"), 1)
    filled = [(number, line) for number, line in lines if line.strip()]
    if not filled:
        raise ConfigError("has no lines", field="data", value=str(path), remedy="Give one JSON object a line")
    return filled


def _parse_question(path: Path, number: int, line: bytes) -> Example:
    try:
        found = msgspec.json.decode(line, type=_Question)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        remedy = 'Give one object a line: {"prompt": "...", "answer": "..."}, both strings'
        raise ConfigError(f"line {number} is no question", field="data", value=str(path), remedy=remedy) from error
    return Example(path.stem, 0, found.prompt, found.answer.strip(), "", found.reply)


def ask(tokenizer: Tokenizer, examples: Sequence[Example], *, max_tokens: int | None = None) -> list[Ask]:
    """``examples`` as requests. ``max_tokens`` is for all of them; None: a little more than the right reply has."""
    asks = []
    for example in examples:
        limit = max_tokens or _reply_limit(tokenizer, example.reply)
        # A chain of thought stands between special tokens, which the grader has to see.
        params = SamplingParams(temperature=0.0, max_tokens=limit, skip_special_tokens=False)
        prompt = prompt_ids(tokenizer, example)
        asks.append(Ask(prompt, params, _num_first(tokenizer, example, prompt)))
    return asks


def prompt_ids(tokenizer: Tokenizer, example: Example) -> list[int]:
    """The conversation up to the reply as the model reads it: in its chat template, if it has one."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(
            "\n".join([*(text for turn in example.history for text in (turn[0], turn[2])), example.prompt])
        )
    messages = [message for turn in example.history for message in _messages(turn)]
    return tokenizer.chat_prompt([*messages, {"role": "user", "content": example.prompt}])[1]


def _messages(turn: Turn) -> list[dict[str, str]]:
    """A turn as the messages of user and model; the reasoning apart, as in a reply of the engine."""
    prompt, thought, answer = turn
    reply = {"role": "assistant", "content": answer} | ({"reasoning_content": thought} if thought else {})
    return [{"role": "user", "content": prompt}, reply]


def _num_first(tokenizer: Tokenizer, example: Example, prompt: list[int]) -> int:
    """Tokens at the beginning of ``prompt`` that the first message alone begins with, too."""
    if not example.history:
        return len(prompt)
    alone = prompt_ids(tokenizer, example._replace(prompt=example.history[0][0], history=()))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, prompt, strict=False))
    return max(1, len(list(same)))


def _reply_limit(tokenizer: Tokenizer, reply: str) -> int:
    if not reply:
        return OPEN_END_TOKENS
    num_tokens = len(tokenizer.encode(reply, add_special_tokens=False))
    return int((1 + SLACK_SHARE) * num_tokens) + SLACK_TOKENS
