"""Accuracy of the demo model by the papers' own rules: ``python -m studies.papers --scheme kivi-2,kitty --samples 20``.

Each question is decoded twice: by the paper's rule, token by token through the simulated cache of one sequence, and by
the engine with the same bits, whose unit is the block of 128 tokens. Greedy, exact match, float32 weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import NamedTuple

from qkv_engine import Engine
from qkv_engine.bench.grading import grade, sample_examples, wilson_interval
from qkv_engine.bench.questions import Ask, Task, ask, parse_tasks
from qkv_engine.bench.report import number
from qkv_engine.bench.table import Column, Table, from_rows
from qkv_engine.config import KVConfig
from qkv_engine.loading import demo_folder
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.presets import PRESETS
from qkv_engine.text.tokenizer import Tokenizer

from .. import results
from . import hadamard, kitty, kivi, kvarn, kvmix, patternkv, pm_kvq, xquant
from .cache import LayerCache, Scheme, full_precision
from .decode import generate
from .demo import HEAD_DIM, demo_model

PROFILE_TEXTS = 10  # right conversations a task for KVmix's scores, as released
PM_KVQ_TOKENS = 1024  # of PM-KVQ's budget a layer: about a question with its reply, so all layers end at the floor
PROFILE_SEED = 1_000_003  # unlike any likely seed of questions


@cache
def profiled(task: str, size: int) -> kvmix.HighLayers:
    """The demo model's layers with the largest gradients on right conversations of ``task``."""
    examples = sample_examples(task, size, PROFILE_TEXTS, PROFILE_SEED)
    texts = [example.chat + example.reply for example in examples]
    return kvmix.top_layers(*kvmix.gradient_scores(demo_folder(), texts))


def _kvmix(task: Task, num_layers: int, *, faithful: bool) -> Scheme:
    assert task.size is not None, "demo tasks have one"
    return kvmix.scheme(profiled(task.name, task.size), num_layers, faithful=faithful)


# Schemes by name, made for a task (which KVmix profiles) and the model's number of layers. Kitty's simulator boosts
# 10 % and 20 % of 128 channels in the paper's tables, its engine 12.5 % and 25 %.
SCHEMES: dict[str, Callable[[Task, int], Scheme]] = {
    "fp16": lambda task, n: Scheme(lambda _: LayerCache(full_precision(), full_precision()), PRESETS["bf16"]),
    "kivi-4": lambda task, n: kivi.scheme(4, 4),
    "kivi-k4v2": lambda task, n: kivi.scheme(4, 2),
    "kivi-k2v4": lambda task, n: kivi.scheme(2, 4),
    "kivi-2": lambda task, n: kivi.scheme(2, 2),
    "kivi-2-g128": lambda task, n: kivi.scheme(2, 2, group=128),
    "kitty": lambda task, n: kitty.scheme(16, PRESETS["kitty"]),
    "kitty-pro": lambda task, n: kitty.scheme(32, PRESETS["kitty-pro"]),
    "kitty-simulator": lambda task, n: kitty.scheme(12, PRESETS["kitty"], simulator=True),
    "kitty-pro-simulator": lambda task, n: kitty.scheme(25, PRESETS["kitty-pro"], simulator=True),
    "xquant": lambda task, n: xquant.scheme(xquant.largest(n), PRESETS["xquant-g32"]),
    "xquant-plain": lambda task, n: xquant.scheme(xquant.largest(n), None, etas={1: 0.0, 2: 0.0}),
    "xquant-of-3": lambda task, n: xquant.scheme(xquant.largest(n), None, sharing=3),
    "xquant-of-4": lambda task, n: xquant.scheme(xquant.largest(n), None, sharing=4),
    "k2v1": lambda task, n: xquant.two_and_one(n, etas={1: 0.0, 2: 0.0}),
    "k2v1-eta": lambda task, n: xquant.two_and_one(n),
    "kvmix-2": lambda task, n: kvmix.scheme(kvmix.HighLayers(), n),
    "kvmix-2.19": lambda task, n: _kvmix(task, n, faithful=True),
    "kvmix-2.19-own-step": lambda task, n: _kvmix(task, n, faithful=False),
    "patternkv": lambda task, n: patternkv.scheme(HEAD_DIM, PRESETS["patternkv"]),
    "pm-kvq-4": lambda task, n: pm_kvq.scheme(4, n, max_len=PM_KVQ_TOKENS),
    "pm-kvq-2": lambda task, n: pm_kvq.scheme(2, n, max_len=PM_KVQ_TOKENS),
    "pm-kvq-2-modified": lambda task, n: pm_kvq.scheme(2, n, max_len=PM_KVQ_TOKENS, variant=pm_kvq.MODIFIED),
    "pm-kvq-2-direct": lambda task, n: pm_kvq.scheme(2, n, max_len=PM_KVQ_TOKENS, variant=pm_kvq.DIRECT),
    "kvarn-k4v2": lambda task, n: Scheme(lambda _: kvarn.layer(4, 2), None),
    "kvarn-k2v2": lambda task, n: Scheme(lambda _: kvarn.layer(2, 2), None),
    "hadamard-2": lambda task, n: Scheme(lambda _: hadamard.layer(2), None),
}


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A task with one scheme: right answers by the paper's rule and by blocks, None where no preset serves it.

    ``full_k`` and ``full_v`` are the tokens in full precision at the end of a reply, mean of layers and questions;
    ``seconds`` is the time the simulated replies took.
    """

    task: str
    scheme: str
    samples: int
    right: int
    full_k: float
    full_v: float
    tokens: int
    seconds: float
    preset: str | None = None
    preset_right: int | None = None


class Reply(NamedTuple):
    """A simulated reply, and the tokens that its layers then hold in full precision, K and V, mean of the layers."""

    text: str
    num_tokens: int
    full_k: float
    full_v: float


def measure(name: str, task: Task, model: LlamaForCausalLM, tokenizer: Tokenizer) -> PaperRow:
    """Asks the questions of ``task`` by the rules of scheme ``name``, and by its blocks."""
    scheme, asks, replies = SCHEMES[name](task, model.config.num_layers), ask(tokenizer, task.examples), list[Reply]()
    start = time.monotonic()
    for number_asked, asked in enumerate(asks, 1):
        replies.append(by_rule(scheme, asked, model, tokenizer))
        print(f"\r{name}, {task.label}: {number_asked} of {len(asks)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    seconds = time.monotonic() - start
    return PaperRow(
        task=task.label,
        scheme=name,
        samples=len(asks),
        right=grade([reply.text for reply in replies], list(task.examples)).correct,
        full_k=mean(reply.full_k for reply in replies),
        full_v=mean(reply.full_v for reply in replies),
        tokens=sum(reply.num_tokens for reply in replies),
        seconds=seconds,
        preset=None if scheme.preset is None else scheme.preset.name,
        preset_right=None if scheme.preset is None else by_blocks(scheme.preset, task, asks),
    )


def by_rule(scheme: Scheme, asked: Ask, model: LlamaForCausalLM, tokenizer: Tokenizer) -> Reply:
    """One question, token by token through simulated caches."""
    layers = [scheme.layer(i) for i in range(model.config.num_layers)]
    assert tokenizer.eos_token_id is not None and asked.params.max_tokens is not None, "of the demo model, of ask"
    ids = generate(model, layers, asked.prompt, asked.params.max_tokens, {tokenizer.eos_token_id})
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return Reply(text, len(ids), mean(layer.k.full for layer in layers), mean(layer.v.full for layer in layers))


def by_blocks(preset: KVConfig, task: Task, asks: list[Ask]) -> int:
    """Right answers of the engine, which is asked all at once."""
    with Engine(kv=preset, device="cpu", dtype="float32", kv_memory="1GiB") as engine:
        outputs = engine.generate([asked.prompt for asked in asks], [asked.judged for asked in asks])
    return grade([output.text for output in outputs], list(task.examples)).correct


def papers_table(rows: Sequence[PaperRow]) -> Table:
    """The rows for people."""
    columns: list[Column[PaperRow]] = [
        Column("task", lambda row: row.task, is_text=True),
        Column("scheme", lambda row: row.scheme),
        Column("samples", lambda row: str(row.samples)),
        Column("right", lambda row: str(row.right)),
        Column("95 % interval", lambda row: _interval(row.right, row.samples), spare=4),
        Column("16-bit K", lambda row: number(row.full_k, 0)),
        Column("16-bit V", lambda row: number(row.full_v, 0)),
        Column("tokens", lambda row: str(row.tokens), spare=2),
        Column("seconds", lambda row: number(row.seconds, 0), spare=1),
        Column("as blocks", lambda row: row.preset or ""),
        Column("right as blocks", lambda row: number(row.preset_right, 0)),
        Column("its interval", lambda row: _interval(row.preset_right, row.samples), spare=3),
    ]
    title = "demo model, float32, greedy, exact match: the papers' rules and the engine's blocks"
    return from_rows(title, rows, columns, [])


def _interval(right: int | None, samples: int) -> str:
    if right is None:
        return ""
    low, high = wilson_interval(right, samples)
    return f"{100 * low:.0f} - {high:.0%}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; ``scheme`` is a list. Raises ``SystemExit`` 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scheme", default="fp16,kivi-2,kitty,kvmix-2.19", metavar="LIST", help=f"of {', '.join(SCHEMES)}")
    add("--task", default="ledger", metavar="LIST", help='such as "ledger:40,lookup" (default: %(default)s)')
    add("--samples", type=int, default=20, metavar="N", help="questions a task (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the questions (default: %(default)s)")
    results.add_options(parser)
    args = parser.parse_args(argv)
    args.scheme = [name.strip() for name in args.scheme.split(",")]
    unknown = [name for name in args.scheme if name not in SCHEMES]
    if unknown:
        parser.error(f"argument --scheme: no scheme {unknown[0]!r} (choose from {', '.join(SCHEMES)})")
    if args.samples < 1:
        parser.error("--samples must be at least 1")
    return args


def run(args: argparse.Namespace) -> Iterator[PaperRow]:
    """A row for each task and scheme. Raises ``ConfigError`` for a task that does not exist."""
    tasks = parse_tasks(args.task, samples=args.samples, seed=args.seed, field="task")
    with demo_model() as (model, tokenizer):
        yield from (measure(name, task, model, tokenizer) for task in tasks for name in args.scheme)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code; Ctrl-C prints the rows there are."""
    args = parse_args(argv)
    rows, code = results.collect(run(args))
    if rows:
        results.deliver(args, rows, papers_table(rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
