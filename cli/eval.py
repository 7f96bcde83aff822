"""``qkv-engine eval``: accuracy of each KV preset through the real quantized cache.

Questions with one right answer here; perplexity and the lm-evaluation-harness in modules of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from . import common, eval_divergence, eval_harness, eval_perplexity, results, tasks
from .combinations import check_combinations
from .model import check_ladders

if TYPE_CHECKING:
    from qkv_engine import KVConfig
    from qkv_engine.bench.accuracy import AccuracyPlan, AccuracyRow, Sample
    from qkv_engine.bench.questions import Task

DEFAULT_TASKS = "ledger:40,lookup:100,addition:10"
DEFAULT_SAMPLES = 24
_OF_QUESTIONS = ("task", "tasks", "data", "samples", "max_tokens", "log_samples")
EXCLUDED = {
    "divergence": eval_divergence.EXCLUDES,
    "perplexity": (*_OF_QUESTIONS, "lm_eval"),
    "lm_eval": _OF_QUESTIONS,
    **tasks.EXCLUDED,
}
NEEDED = {
    **dict.fromkeys(eval_perplexity.OPTIONS, ("perplexity",)),
    **dict.fromkeys(eval_harness.OPTIONS, ("lm_eval",)),
}

EPILOG = """\
A reply is right if what follows its <think> block is exactly the answer. Outputs
are greedy; every preset of --kv is asked the same questions, all of a task at
once. Rows go to stdout, progress to stderr; Ctrl-C prints the rows there are.

columns:
  task, size       the questions and their difficulty
  samples, right   questions asked; answered exactly right
  95 % interval    Wilson's interval of the accuracy
  same as KV       replies equal to the letter to those of the first preset
  vs row above, p  questions that this row alone : the row above alone answered
                   right, and McNemar's exact test: what chance would do
  cut              replies ended by --max-tokens
  bits a block     of a KV element in a block on the last rung, metadata counted
  bits held        the same when the most KV was held, 16-bit windows counted
  lowest           fewest bits of any block of any request at its end
  tokens, seconds  of all replies together
  demotions        blocks that stepped down to fewer bits
  preemptions      requests that gave their KV back and were computed again

--divergence has instead:
  KL, nats         mean divergence of a token's distribution from the first
                   preset's, over its 20 likeliest tokens and the rest as one
  first choice     tokens in whose place another one is now the likeliest
  95 %             bootstrap over texts
  vs row above, p  texts that diverge less : more, and the sign test
  to the letter    texts whose every token is the likeliest

--perplexity FILE has instead:
  tokens, nll      scored tokens, their mean negative log-likelihood in nats
  perplexity       exp(nll)
  bits/byte        nll of the whole text in bits, by its UTF-8 bytes
  vs KV            perplexity divided by the first preset's
  tok/s            tokens of all windows a second

--lm-eval TASKS has instead:
  metric, value    as the task defines them; ± is the standard error
  few-shot         examples before each question
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``eval``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    common.add_model_arguments(parser, takes_kv_list=True)
    add = parser.add_argument_group("evaluation").add_argument
    tasks.add_argument(
        add,
        "tasks",
        metavar="LIST",
        help=f'demo tasks with their sizes, such as "ledger:40,sorting" (default: {DEFAULT_TASKS})',
    )
    add(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help='questions of your own: {"prompt": "...", "answer": "..."} a line; alone unless --tasks is given too',
    )
    add("--samples", type=int, metavar="N", help=f"questions a task (default: {DEFAULT_SAMPLES})")
    add("--seed", type=int, default=0, metavar="N", help="seed of the demo tasks (default: %(default)s)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="longest reply (default: a little more than the right one's; 512 where that is unknown)",
    )
    results.add_arguments(add)
    add(
        "--log-samples",
        type=Path,
        metavar="FILE.jsonl",
        help="write every question, the expected and the given answer, and whether it is right",
    )
    eval_divergence.add_arguments(parser.add_argument_group("divergence").add_argument)
    eval_perplexity.add_arguments(parser.add_argument_group("perplexity").add_argument)
    eval_harness.add_arguments(parser.add_argument_group("lm-evaluation-harness").add_argument)


def run(args: argparse.Namespace) -> int:
    """Measures accuracy as ``args`` say and returns the exit code."""
    check_combinations(args, excluded=EXCLUDED, needed=NEEDED)
    if args.perplexity is not None:
        return eval_perplexity.run(args)
    if args.lm_eval is not None:
        return eval_harness.run(args)
    if args.divergence:
        return eval_divergence.run(args, _demo_tasks(args), _samples(args))
    return _run_questions(args)


def _run_questions(args: argparse.Namespace) -> int:
    from qkv_engine.bench.accuracy import evaluate

    ladders = common.kv_ladders(args.kv, state_dtype=args.state_dtype)
    plan = _plan(args, tuple(ladders))
    results.check_targets(args, log_samples=(".jsonl",))
    check_ladders(args, ladders.values())
    samples: list[Sample] = []
    open_engine, describe = common.eval_engines(args, ladders), common.describe_with(args)
    rows = results.collect(
        len(plan.kvs) * len(plan.tasks),
        lambda bar: evaluate(plan, open_engine, watch=bar.watch, log=samples.extend, describe=describe),
        lambda rows: _deliver(args, ladders, rows, samples),
    )
    return results.exit_code(row.status for row in rows)


def _deliver(
    args: argparse.Namespace, ladders: Mapping[str, KVConfig], rows: list[AccuracyRow], samples: list[Sample]
) -> None:
    """Rows to stdout and to the file, samples to theirs."""
    from qkv_engine.bench.accuracy import accuracy_table
    from qkv_engine.bench.report import as_json

    extras = []
    if args.log_samples is not None:
        lines = "".join(as_json(asdict(sample)) + "\n" for sample in samples)
        extras.append(results.Extra(args.log_samples, lines.encode, f"{len(samples)} samples"))
    results.deliver_rows(args, rows, [accuracy_table(rows, ladders)], *extras)


def _plan(args: argparse.Namespace, kvs: tuple[str, ...]) -> AccuracyPlan:
    from qkv_engine.bench.accuracy import AccuracyPlan
    from qkv_engine.bench.questions import read_questions

    common.check_least(args, max_tokens=1)
    asked = _demo_tasks(args)
    if args.data is not None:
        asked += (read_questions(args.data, samples=_samples(args)),)
    model = args.model or common.DEMO
    return AccuracyPlan(model=model, kvs=kvs, tasks=asked, max_tokens=args.max_tokens, seed=args.seed)


def _demo_tasks(args: argparse.Namespace) -> tuple[Task, ...]:
    """The demo tasks that are asked for: the usual ones where nothing else is, none beside ``--data`` alone."""
    from qkv_engine.bench.questions import parse_tasks

    given = tasks.given(args)
    if given is None and args.data is not None:
        return ()
    text, field = (DEFAULT_TASKS, "tasks") if given is None else (given.text, given.field)
    return parse_tasks(text, samples=_samples(args), seed=args.seed, field=field)


def _samples(args: argparse.Namespace) -> int:
    common.check_least(args, samples=1)
    return DEFAULT_SAMPLES if args.samples is None else int(args.samples)
