"""Texts that a plan is profiled on: demo tasks with their right replies, lines of a file, or random tokens."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from qkv_engine.errors import ConfigError, RequestError
from qkv_engine.planner.gradients import Text
from qkv_engine.planner.profile import Prompts
from qkv_engine.planner.sensitivity import SINK
from qkv_engine.text.tokenizer import Tokenizer

from .grading import Example, Purpose
from .questions import parse_tasks, prompt_ids, read_lines
from .runs import random_prompts

SHOWN_CHARS = 40  # of a question in a message
MIN_LABELS = 128  # of all texts together: with fewer, chance ranks the layers


class TextSet(NamedTuple):
    """Texts and their source in words. Those longer than ``max_tokens`` have been cut to it."""

    source: str
    texts: list[Text]
    max_tokens: int

    @property
    def prompts(self) -> Prompts:
        """The set as a plan file records it."""
        tokens = sum(len(text.token_ids) for text in self.texts)
        return Prompts(source=self.source, count=len(self.texts), tokens=tokens, max_tokens=self.max_tokens)


def task_texts(
    tokenizer: Tokenizer, tasks: str, *, samples: int, max_tokens: int, seed: int = 0, field: str = "tasks"
) -> TextSet:
    """``samples`` questions with their replies, spread over the demo tasks of "ledger:40,lookup"; the replies count.

    No seed gives a question that ``eval`` asks. Raises ``ConfigError`` for an unknown task, or where a question leaves
    no room for its reply.
    """
    found = parse_tasks(tasks, samples=samples, seed=seed, field=field, purpose=Purpose.PROFILE)
    if samples < len(found):
        raise ConfigError("fewer than there are tasks", field="samples", value=samples)
    mixed = list(chain.from_iterable(zip(*(task.examples for task in found), strict=True)))[:samples]
    texts = [_conversation(tokenizer, example, max_tokens) for example in mixed]
    return _checked(TextSet(", ".join(task.label for task in found), texts, max_tokens), field, tasks)


class _Line(msgspec.Struct):
    """A line of a file of texts; other fields are passed over."""

    text: str = ""
    prompt: str = ""
    answer: str = ""
    reply: str = ""


def file_texts(tokenizer: Tokenizer, path: Path, *, samples: int, max_tokens: int) -> TextSet:
    """The first ``samples`` lines of a JSONL file: {"text": "..."}, which counts whole, or {"prompt": "...", "answer":
    "..."}, of which the answer counts, or the "reply" with its reasoning in the answer's place.

    Raises ``ConfigError`` for any other line and for a set that is too short.
    """
    texts = read_texts(tokenizer, path, samples=samples, max_tokens=max_tokens)
    return _checked(TextSet(path.name, texts, max_tokens), "data", str(path))


def read_texts(tokenizer: Tokenizer, path: Path, *, samples: int, max_tokens: int) -> list[Text]:
    """The texts of ``file_texts``, however short they are. Raises ``ConfigError`` for a line that is none."""
    lines = read_lines(path)[:samples]
    return [_line_text(tokenizer, path, number, line, max_tokens) for number, line in lines]


def random_texts(vocab_size: int, *, samples: int, max_tokens: int, seed: int = 0) -> TextSet:
    """``samples`` texts of ``max_tokens`` random tokens: for a model without a tokenizer, to time the profiler."""
    prompts = random_prompts(range(vocab_size), samples, max_tokens, str(seed))
    return TextSet("random tokens", [Text(prompt) for prompt in prompts], max_tokens)


def _line_text(tokenizer: Tokenizer, path: Path, number: int, line: bytes, max_tokens: int) -> Text:
    remedy = 'Give one object a line: {"text": "..."} or {"prompt": "...", "answer": "..."}, all strings'
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"line {number} is no text", field="data", value=str(path), remedy=remedy) from error
    reply = found.reply or found.answer
    try:
        if found.prompt and reply and not found.text:
            return _conversation(tokenizer, Example(path.stem, 0, found.prompt, found.answer, "", reply), max_tokens)
        if found.text and not found.prompt:
            return Text(tokenizer.encode(found.text)[:max_tokens])
    except RequestError as error:  # longer than any tokenizer is given
        raise ConfigError(f"line {number}: {error}", field="data", value=str(path)) from error
    raise ConfigError(f"line {number} is no text", field="data", value=str(path), remedy=remedy)


def _conversation(tokenizer: Tokenizer, example: Example, max_tokens: int) -> Text:
    """The question and the reply; only the reply counts, as nobody asks the model for the question."""
    asked = prompt_ids(tokenizer, example)
    if len(asked) >= max_tokens:
        remedy = f"Give more than the {len(asked):,} tokens of the question"
        message = f"the question {example.prompt[:SHOWN_CHARS]!r} leaves no room for its reply"
        raise ConfigError(message, field="max_tokens", value=max_tokens, remedy=remedy)
    replied = tokenizer.encode(example.reply, add_special_tokens=False)
    return Text([*asked, *replied][:max_tokens], max(1, len(asked)))


def _checked(found: TextSet, field: str, value: str) -> TextSet:
    """``found``, if each of its texts has a token to predict and all together have enough."""
    labels = [len(text.token_ids) - text.first_label for text in found.texts]
    if min(labels) < 1:
        message = f"text {labels.index(min(labels)) + 1} of {len(labels)} has no token to predict"
        raise ConfigError(message, field=field, value=value, remedy="Give texts of two tokens and more")
    if sum(labels) < MIN_LABELS:
        message = f"only {sum(labels)} tokens to predict in {len(labels)} texts"
        raise ConfigError(message, field=field, value=value, remedy=f"Give texts with {MIN_LABELS} or more in all")
    if max(len(text.token_ids) for text in found.texts) <= SINK + 1:
        remedy = f"Give texts of more than {SINK + 1} tokens"
        raise ConfigError(f"no text goes beyond the sink of {SINK} tokens", field=field, value=value, remedy=remedy)
    return found
