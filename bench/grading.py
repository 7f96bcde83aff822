"""Exact-match accuracy on the demo tasks: examples by task, size and seed; grading; confidence intervals."""

from __future__ import annotations

import enum
import math
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from qkv_engine.errors import ConfigError

from .tasks import CONVERSATIONS, TASKS, Turn, chat_text

_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_END = "<|im_end|>"
_Z = 1.959964  # standard deviations of a normal distribution around its mean that hold 95 %


class Purpose(enum.StrEnum):
    """What examples are drawn for; each purpose has random numbers that no seed of another gives."""

    EXAM = ""
    PROFILE = "profile "


class Example(NamedTuple):
    """One task with its right answer; ``prompt`` is what the user says.

    ``history`` are the turns of the conversation before it, each with its right reply.
    """

    task: str
    size: int
    prompt: str
    answer: str
    chat: str  # the prompt as the model reads it, up to where its answer begins
    reply: str = ""  # a right reply in full, chain of thought and end mark included; "" if none is known
    history: tuple[Turn, ...] = ()


class Accuracy(NamedTuple):
    """``correct`` of ``total`` answers, and the 95 % interval of the share that it suggests."""

    correct: int
    total: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.correct / self.total


def task_names() -> tuple[str, ...]:
    """The tasks that can be asked."""
    return (*TASKS, *CONVERSATIONS)


def sample_examples(task: str, size: int, count: int, seed: int = 0, purpose: Purpose = Purpose.EXAM) -> list[Example]:
    """``count`` examples of ``task``. A seed gives the same ones for ever, and the first ones first."""
    if task not in task_names():
        raise ConfigError("unknown task", field="task", value=task, remedy=f"Choose from {', '.join(task_names())}")
    rng = random.Random(f"{purpose.value}{task} {size} {seed}")
    return [_example(task, size, _turns(task, rng, size)) for _ in range(count)]


def _turns(task: str, rng: random.Random, size: int) -> list[Turn]:
    return CONVERSATIONS[task](rng, size) if task in CONVERSATIONS else [TASKS[task](rng, size)]


def _example(task: str, size: int, turns: Sequence[Turn]) -> Example:
    """The last of ``turns`` as the question, those before it as the conversation so far."""
    prompt, _, answer = turns[-1]
    *before, reply, _ = (text for text, _ in chat_text(list(turns)))
    return Example(task, size, prompt, answer, "".join(before), reply, tuple(turns[:-1]))


def final_answer(text: str) -> str:
    """The text of a reply after its ``<think>`` block; nothing if the block never ends."""
    stripped = _THOUGHT.sub("", text.removesuffix(_END), count=1).strip()
    return "" if stripped.startswith("<think>") else stripped


def is_correct(reply: str, answer: str) -> bool:
    """Whether the reply, its chain of thought aside, is exactly ``answer``."""
    return final_answer(reply) == answer


def grade(replies: list[str], examples: list[Example]) -> Accuracy:
    """The number of right ``replies``, which are in the order of ``examples``."""
    correct = sum(is_correct(reply, e.answer) for reply, e in zip(replies, examples, strict=True))
    return Accuracy(correct, len(examples), *wilson_interval(correct, len(examples)))


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: sound for few samples and for shares near 0 and 1."""
    if not 0 <= correct <= total or total == 0:
        raise ConfigError("must lie between 0 and a positive total", field="correct", value=(correct, total))
    return _wilson(correct / total, total)


def mean_interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """A 95 % interval of the mean of several shares, each (right, asked) of one task, all of equal weight.

    Wilson's for the mean as the share of as many answers as give a mean of shares its variance: the number of tasks
    squared over the sum of 1 / asked. Somewhat wide where tasks differ, since their variance among each other counts.
    """
    mean = sum(right / asked for right, asked in counts) / len(counts)
    return _wilson(mean, len(counts) ** 2 / sum(1 / asked for _, asked in counts))


def _wilson(share: float, total: float) -> tuple[float, float]:
    z = _Z
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)
