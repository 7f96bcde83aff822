"""Exact-match accuracy on the demo tasks: examples by task, size and seed; grading; confidence intervals."""

from __future__ import annotations

import math
import random
import re
from typing import NamedTuple

from qkv_engine.errors import ConfigError

from .tasks import TASKS, Turn, chat_text

_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_END = "<|im_end|>"
_Z = 1.959964  # standard deviations of a normal distribution around its mean that hold 95 %


class Example(NamedTuple):
    """One task with its right answer; ``prompt`` is what the user says."""

    task: str
    size: int
    prompt: str
    answer: str
    chat: str  # the prompt as the model reads it, up to where its answer begins
    reply: str = ""  # a right reply in full, chain of thought and end mark included; "" if none is known


class Score(NamedTuple):
    """``correct`` of ``total`` answers, and the 95 % interval of the share that it suggests."""

    correct: int
    total: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.correct / self.total


def sample_examples(task: str, size: int, count: int, seed: int = 0) -> list[Example]:
    """``count`` examples of ``task``. A seed gives the same ones for ever, and the first ones first."""
    if task not in TASKS:
        raise ConfigError("unknown task", field="task", value=task, remedy=f"Choose from {', '.join(TASKS)}")
    rng = random.Random(f"{task} {size} {seed}")
    turns: list[Turn] = [TASKS[task](rng, size) for _ in range(count)]
    pieces = [chat_text([turn]) for turn in turns]
    return [Example(task, size, t[0], t[2], p[0][0], p[1][0]) for t, p in zip(turns, pieces, strict=True)]


def final_answer(text: str) -> str:
    """The text of a reply after its ``<think>`` block; nothing if the block never ends."""
    stripped = _THOUGHT.sub("", text.removesuffix(_END), count=1).strip()
    return "" if stripped.startswith("<think>") else stripped


def is_correct(reply: str, answer: str) -> bool:
    """Whether the reply, its chain of thought aside, is exactly ``answer``."""
    return final_answer(reply) == answer


def score(replies: list[str], examples: list[Example]) -> Score:
    """The number of right ``replies``, which are in the order of ``examples``."""
    correct = sum(is_correct(reply, e.answer) for reply, e in zip(replies, examples, strict=True))
    return Score(correct, len(examples), *wilson_interval(correct, len(examples)))


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: sound for few samples and for shares near 0 and 1."""
    if not 0 <= correct <= total or total == 0:
        raise ConfigError("must lie between 0 and a positive total", field="correct", value=(correct, total))
    share, z = correct / total, _Z
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)
