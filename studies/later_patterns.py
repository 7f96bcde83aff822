"""Patterns of decoding, on short prompts with long replies: ``python -m studies.later_patterns --samples 5``.

A conversation of additions is read by the live engine, the first question in one pass and all that follows as decoding
would: blocks are sealed as they age. A line a cache: the divergence (KL, nats a token) of its predictions from those
at 16 bits, the share of tokens whose likeliest one differs, and on how many conversations it has less divergence than
PatternKV without later patterns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qkv_engine import Engine
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.bench.scoring import scoring_params
from qkv_engine.bench.table import Table, as_markdown, from_columns
from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.device.logprobs import TokenLogprobs, token_logprobs
from qkv_engine.kernels.formats.pattern.presets import pattern_rung
from qkv_engine.presets import PRESETS
from qkv_engine.startup import demo_folder
from qkv_engine.text.tokenizer import Tokenizer

TRUTH, BASE = "16 bits", "32 patterns"  # what divergence is from; the preset patternkv, which others are compared with


def ladder(name: str, rung: RungConfig) -> KVConfig:
    return KVConfig(name=name, rungs=(DENSE16, rung), recent=128, eager=True)


LADDERS = {TRUTH: PRESETS["bf16"], "kivi-2": PRESETS["kivi-2"], BASE: PRESETS["patternkv"]}
LADDERS |= {
    name: ladder(name, pattern_rung(2, mined, later))
    for name, mined, later in (
        ("16 patterns", 16, 0),
        ("16 patterns, 16 later", 16, 16),
        ("32 patterns, 32 later", 32, 32),
        ("32 patterns, 96 later", 32, 96),
        ("64 patterns", 64, 0),
    )
}


@dataclass(frozen=True)
class Reading:
    """One conversation under one cache: mean divergence, and the share of tokens with another likeliest one."""

    divergence: float
    changed: float


def conversations(
    tokenizer: Tokenizer, tasks: str, samples: int, turns: int, seed: int
) -> Iterator[tuple[list[int], int]]:
    """Token ids of ``turns`` questions with right replies one after another, and the tokens of the first question."""
    for task in parse_tasks(tasks, samples=samples * turns, seed=seed):
        for first in range(0, samples * turns, turns):
            some = task.examples[first : first + turns]
            ids = [tokenizer.encode(text) for example in some for text in (example.chat, example.reply)]
            yield [token for part in ids for token in part], len(ids[0])


def log_probs(engine: Engine, ids: list[int], num_prompt_tokens: int) -> Tensor:
    """Log-probabilities [n, V] in the places of all tokens behind the prompt, read as decoding would read them."""
    found: list[Tensor] = []

    def noted(logits: Tensor, *rest: Any) -> list[TokenLogprobs]:
        found.append(logits)
        return token_logprobs(logits, *rest)

    with patch("qkv_engine.device.logits.token_logprobs", noted):  # the engine tells no whole rows
        engine.generate([ids], scoring_params(num_prompt_tokens))
    return torch.cat(found)[num_prompt_tokens - 1 :].log_softmax(-1)


def read(texts: Sequence[tuple[list[int], int]]) -> Iterator[tuple[str, list[Reading]]]:
    """The readings of every text by each cache, the first cache's being the truth."""
    truth: list[Tensor] = []
    for name, kv in LADDERS.items():
        readings = []
        with Engine(kv=kv, device="cpu", dtype="float32", kv_memory="256MiB", prefix_caching=False) as engine:
            for index, (ids, num_prompt_tokens) in enumerate(texts):
                found = log_probs(engine, ids, num_prompt_tokens)
                if name == TRUTH:
                    truth.append(found)
                exact = truth[index]
                divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
                readings.append(Reading(divergence, float((found.argmax(-1) != exact.argmax(-1)).float().mean())))
                print(f"{name}, {index}: {readings[-1]}", file=sys.stderr)
        yield name, readings


def as_table(found: dict[str, list[Reading]], title: str) -> Table:
    """A line a cache."""
    base = found[BASE]
    columns: dict[str, list[str]] = {"cache": list(found)}
    columns["KL, 1e-3 nats"] = [f"{1e3 * _mean([r.divergence for r in rs]):.3f}" for rs in found.values()]
    columns["tokens changed, %"] = [f"{100 * _mean([r.changed for r in rs]):.3f}" for rs in found.values()]
    columns[f"less than {BASE}"] = [
        f"{sum(mine.divergence < other.divergence for mine, other in zip(rs, base, strict=True))} of {len(base)}"
        for rs in found.values()
    ]
    return from_columns(title, columns, [])


def _span(values: list[int]) -> str:
    return f"{min(values):,} to {max(values):,}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="addition:16")
    parser.add_argument("--samples", type=int, default=5, help="conversations a task")
    parser.add_argument("--turns", type=int, default=1, help="questions of a conversation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with closing(Tokenizer.from_folder(demo_folder())) as tokenizer:
        texts = list(conversations(tokenizer, args.tasks, args.samples, args.turns, args.seed))
    prompts, replies = [first for _, first in texts], [len(ids) - first for ids, first in texts]
    title = f"{len(texts)} conversations: {_span(prompts)} tokens of the first question, {_span(replies)} behind it"
    print(as_markdown(as_table(dict(read(texts)), title)))


if __name__ == "__main__":
    main()
