"""The options of ``bench`` that ask questions beside measuring speed: ``--eval``, ``--samples`` and ``--pareto``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from qkv_engine.bench.batches import MAX
from qkv_engine.config import KVConfig
from qkv_engine.errors import ConfigError
from qkv_engine.presets import main_presets

from .. import common, results
from ..eval import DEFAULT_SAMPLES, DEFAULT_TASKS
from ..model import read_model

if TYPE_CHECKING:
    from qkv_engine import Engine
    from qkv_engine.bench.filled import FilledEngine
    from qkv_engine.bench.quality import Answering, RatedRow
    from qkv_engine.bench.questions import Task
    from qkv_engine.bench.sweep import SweepPlan

PARETO_MEMORY = "8x"  # of --pareto without --kv-memory: requests at 16 bits, so that any machine has enough
PARETO_INPUT_LEN = 1024  # tokens; under shorter prompts recent windows at 16 bits hide what a preset saves
EPILOG = (
    "--eval asks for right answers of the preset alone: a ladder that steps down under pressure answers with all "
    "blocks on its floor, as when memory is full; --task counts those under the load that is measured. "
)


def add_arguments(add: Callable[..., Any]) -> None:
    """The options; ``add`` is an argument group's ``add_argument``."""
    add(
        "--eval",
        metavar="TASKS",
        help='show how many answers are right, too: demo tasks such as "ledger:40,lookup", asked of the engine of each '
        "preset once it is measured, or of the demo model where --shape has random weights",
    )
    add("--samples", type=int, metavar="N", help=f"questions a task of --eval (default: {DEFAULT_SAMPLES})")
    add(
        "--eval-plans",
        metavar="FILES",
        help="plans of the demo model, with which it answers in place of the plans in --kv: one for each, in order",
    )
    add(
        "--pareto",
        action="store_true",
        help="compare the presets without -g32 and -sink, or those of --kv, each at the largest batch that --kv-memory "
        f"(default: {PARETO_MEMORY}) holds or the best of --batch-sweep: throughput and capacity against --eval "
        f"(default: {DEFAULT_TASKS})",
    )


class Questions(NamedTuple):
    """The tasks of ``--eval``. ``of_demo``: the demo model answers, since the weights are random.

    ``num_tokens``: of KV that the longest of them may need.
    """

    tasks: tuple[Task, ...]
    num_tokens: int
    of_demo: bool


def set_defaults(args: argparse.Namespace) -> None:
    """Fills in the defaults of ``--pareto`` and ``--samples``. Raises ``ConfigError`` for ``--samples`` below 1."""
    if args.pareto:
        memory = PARETO_MEMORY if args.memory is None else None
        kvs = ",".join(main_presets())
        common.fill_in(args, kv=kvs, batch_sweep=MAX, kv_memory=memory, input_len=PARETO_INPUT_LEN)
    common.fill_in(args, samples=DEFAULT_SAMPLES)
    common.check_least(args, samples=1)


def questions(args: argparse.Namespace) -> Questions:
    """The questions to be asked, if any. Raises ``ConfigError`` for what is no task, or a model without tokenizer."""
    from qkv_engine.bench.questions import Workload, ask, parse_tasks

    text = DEFAULT_TASKS if args.eval is None and args.pareto else args.eval
    if text is None:
        return Questions((), 0, of_demo=False)
    found = parse_tasks(text, samples=args.samples, seed=args.seed, field="eval")
    own = read_model(args, args.shape)
    of_demo = own.folder is None
    tokenizer = (read_model(_demo(args)) if of_demo else own).tokenizer("eval")
    return Questions(found, max(Workload(task, ask(tokenizer, task.examples)).num_tokens for task in found), of_demo)


def make_room(args: argparse.Namespace, asked: Questions, plan: SweepPlan) -> None:
    """Lets the engines of a sweep take the questions, where ``--max-model-len`` is left to them."""
    if not asked.of_demo and asked.num_tokens > plan.num_tokens:
        args.max_model_len = asked.num_tokens + 1
        args.options["max_model_len"] = "--eval (tokens of a question)"


def answering(
    args: argparse.Namespace,
    asked: Questions,
    plan: SweepPlan,
    ladders: Mapping[str, KVConfig],
    open_engine: Callable[[SweepPlan, KVConfig], Engine | FilledEngine],
) -> Answering:
    """Opener of the engines of ``plan`` that has each preset asked; ``open_engine`` opens one engine with a ladder."""
    from qkv_engine.bench.accuracy import AccuracyPlan
    from qkv_engine.bench.quality import Answering, at_floor

    asked_with = _stand_ins(args, asked, ladders)

    def open_other(name: str) -> Engine:
        floor = at_floor(asked_with[name])
        engine = _open_demo(args, asked, floor) if asked.of_demo else open_engine(replace(plan, sampled=False), floor)
        return cast("Engine", engine)

    names = [name for name, kv in ladders.items() if asked.of_demo or plan.sampled or kv != at_floor(kv)]
    model = common.DEMO if asked.of_demo else args.shape or args.model or common.DEMO
    return Answering(
        plan=AccuracyPlan(model=model, kvs=tuple(ladders), tasks=asked.tasks, seed=args.seed),
        open_engine=lambda name: open_engine(plan, ladders[name]),
        others={name: partial(open_other, name) for name in names},
        describe=common.describe_with(args),
    )


def _stand_ins(args: argparse.Namespace, asked: Questions, ladders: Mapping[str, KVConfig]) -> Mapping[str, KVConfig]:
    """The ladders with which questions are answered: those of ``--eval-plans`` in place of plans for a shape.

    Raises ``ConfigError`` unless there is one for each, and random weights that need it.
    """
    if args.eval_plans is None:
        return ladders
    if not asked.of_demo:
        remedy = "Leave it out"
        raise ConfigError("the model answers itself", field="eval_plans", value=args.eval_plans, remedy=remedy)
    plans, given = [name for name, kv in ladders.items() if kv.model is not None], common.kv_ladders(args.eval_plans)
    if len(plans) != len(given):
        message = f"{len(given)} for the {len(plans)} plans of --kv"
        remedy = "Give one for each, in their order"
        raise ConfigError(message, field="eval_plans", value=args.eval_plans, remedy=remedy)
    return {**ladders, **dict(zip(plans, given.values(), strict=True))}


def deliver_pareto(args: argparse.Namespace, ladders: Mapping[str, KVConfig], rows: Sequence[RatedRow]) -> None:
    """All rows with their capacities to the file; the best of each preset to stdout and into the plot."""
    from qkv_engine.bench.pareto import pareto_table, with_capacity
    from qkv_engine.bench.plots.pareto import plot_pareto

    config = read_model(args, args.shape).config
    found = [with_capacity(row, ladders[row.kv], config) for row in rows]
    picture = results.plot(args, lambda kind: plot_pareto(found, kind=kind))
    results.deliver_rows(args, found, [pareto_table(found, ladders)], *picture)


def _demo(args: argparse.Namespace) -> argparse.Namespace:
    """The options of ``args`` that are for the demo model, too."""
    names = ("device", "dtype", "num_threads")
    return argparse.Namespace(model=None, **{name: getattr(args, name) for name in names})


def _open_demo(args: argparse.Namespace, asked: Questions, kv: KVConfig) -> Engine:
    """The demo model on the same device, with KV memory of its own."""
    return common.open_engine(_demo(args), kv=kv, max_model_len=asked.num_tokens + 1, prefix_caching=False)
