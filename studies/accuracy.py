"""Accuracy of presets on the demo tasks: ``python -m studies.accuracy --kv bf16,kitty-pro,kivi-2 --samples 200``.

One row a preset: right answers of each demo task, the mean over tasks, and the questions that it alone and the row
above alone answered. ``--boost 0,12.5,25,50,100`` adds ladders
with that percentage of K's channels at four bits, chosen by each of ``--rankings``; ``--plot`` draws them (Kitty's
Figure 4). ``--plans FILE ...`` adds plan files as one row: the mean of several draws, such as KVmix's random control.
``--eager`` measures the floors of ladders that step down under pressure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from qkv_engine import Engine
from qkv_engine.bench.accuracy import AccuracyPlan, AccuracyRow, evaluate
from qkv_engine.bench.files import write_file
from qkv_engine.bench.grading import mean_interval
from qkv_engine.bench.paired import ABOVE, Paired, paired_cell, sign_test
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.bench.report import number, render
from qkv_engine.bench.sizing import make_ladder
from qkv_engine.bench.table import Column, Table, as_markdown, from_rows
from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.loading import demo_folder
from qkv_engine.models.loader import read_config
from qkv_engine.planner.plan import read_plan
from qkv_engine.presets import PLAN_SUFFIX, resolve_kv

from .accuracy_plot import Point, draw_bits

TASKS = "ledger:40,lookup:100,addition:10,sorting:40"
STYLES = ("o-", "s--", "D:")  # of the lines of a plot


class Result(NamedTuple):
    """Answers with one cache by task and size; for several plans the sum.

    ``held``: effective bits when the most was held. ``floor``: of a block on the last rung, None for several plans.
    ``paired``: against the row above, None for the first and for several plans.
    """

    name: str
    right: dict[str, int]
    asked: dict[str, int]
    held: float
    floor: float | None
    paired: Paired | None

    @property
    def mean(self) -> float:
        """The mean of the tasks' shares of right answers."""
        return sum(right / self.asked[task] for task, right in self.right.items()) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean."""
        return mean_interval([(right, self.asked[task]) for task, right in self.right.items()])


def boosted(percent: str, ranking: str) -> KVConfig:
    """Kitty's cache with ``percent`` of K's channels at four bits, chosen by ``ranking``."""
    suffix = "" if ranking == "magnitude" else f"-{ranking}"
    rung = RungConfig("boosted", f"kitty-{percent}{suffix}", "int2-token-128")
    return KVConfig(name=f"boost {percent} % {ranking}", rungs=(DENSE16, rung), sink=32, recent=128, eager=True)


def run(ladders: Mapping[str, KVConfig], args: argparse.Namespace) -> dict[str, list[AccuracyRow]]:
    """The rows of each cache, which answers the questions in turn."""
    tasks = parse_tasks(args.tasks, samples=args.samples, seed=args.seed)
    plan = AccuracyPlan(model="demo", kvs=tuple(ladders), tasks=tasks, seed=args.seed)

    def open_engine(name: str) -> Engine:
        return Engine(kv=ladders[name], kv_memory=args.kv_memory, prefix_caching=False, device=args.device)

    rows: dict[str, list[AccuracyRow]] = {name: [] for name in ladders}
    for row in evaluate(plan, open_engine):
        rows[row.kv].append(row)
        line = f"{row.kv}, {row.task}: {row.right} of {row.samples}, {row.seconds} s {row.detail or ''}"
        print(line, file=sys.stderr)
    return rows


def floor_bits(kv: KVConfig) -> float:
    """Effective bits of a block of the demo model on the last rung of ``kv``."""
    return make_ladder(kv, read_config(demo_folder()), torch.float32).narrowest.effective_bits


def point(name: str, found: Result) -> Point:
    """A row of the table as a point of the plot; ``name`` is as given on the command line."""
    method = read_plan(name).method if name.endswith(PLAN_SUFFIX) else None
    assert found.floor is not None, "of one ladder"
    return Point(found.name, method, found.floor, found.mean)


def result(name: str, rows: Sequence[AccuracyRow], floor: float | None = None) -> Result:
    """The sum of a cache's rows, task by task."""
    right, asked = dict[str, int](), dict[str, int]()
    for row in rows:
        label = f"{row.task} {row.size}"
        right[label] = right.get(label, 0) + (row.right or 0)
        asked[label] = asked.get(label, 0) + row.samples
    held = [row.effective_bits for row in rows if row.effective_bits is not None]
    better, worse = (sum(getattr(row, field) or 0 for row in rows) for field in ("better", "worse"))
    is_paired = floor is not None and all(row.better is not None for row in rows)
    paired = Paired(better, worse, sign_test(better, worse)) if is_paired else None
    return Result(name, right, asked, sum(held) / max(1, len(held)), floor, paired)


def as_table(results: Sequence[Result], title: str) -> Table:
    def share(task: str, result: Result) -> str:
        return f"{100 * result.right[task] / result.asked[task]:.1f}"

    columns: list[Column[Result]] = [
        Column("kv", lambda result: result.name, is_text=True),
        *(Column(task, partial(share, task)) for task in results[0].right),
        Column("mean", lambda result: f"{100 * result.mean:.1f}"),
        Column("95 % interval", lambda r: f"{100 * r.interval[0]:.1f} - {100 * r.interval[1]:.1f}"),
        Column(ABOVE, lambda result: "" if result.paired is None else paired_cell(*result.paired)),
        Column("bits a block", lambda result: number(result.floor, 2)),
        Column("bits held", lambda result: number(result.held, 2)),
    ]
    return from_rows(title, results, columns, [])


def draw(boosts: Sequence[tuple[str, str, Result]], path: Path) -> None:
    """Mean accuracy against the share of boosted channels, a line a ranking."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for style, ranking in zip(STYLES, dict.fromkeys(ranking for _, ranking, _ in boosts), strict=False):
        line = sorted((float(percent), found) for percent, name, found in boosts if name == ranking)
        shares, means = [percent for percent, _ in line], [100 * found.mean for _, found in line]
        lows, highs = ([100 * found.interval[end] for _, found in line] for end in (0, 1))
        axes.plot(shares, means, style, label=f"by {ranking}")
        axes.fill_between(shares, lows, highs, color=axes.lines[-1].get_color(), alpha=0.12, linewidth=0)
    axes.set_xlabel("K channels at 4 bits, %")
    axes.set_ylabel("right answers, %, mean of the tasks")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``run`` takes."""
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-memory", default="4GiB")
    parser.add_argument("--device", default="auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv", default="bf16,int4,kitty-pro,kitty,kivi-2-sink,kivi-2", help="presets and plan files")
    parser.add_argument("--plans", nargs="*", default=[], help="plan files whose mean is one row")
    parser.add_argument(
        "--eager", action="store_true", help="go to the floor of every cache as soon as blocks are full"
    )
    parser.add_argument("--boost", default="", help="percentages of boosted channels")
    parser.add_argument("--rankings", default="magnitude", help="magnitude, variance, random")
    add_options(parser)
    parser.add_argument("--output", type=Path, help="rows, .json")
    parser.add_argument("--plot", type=Path, help="accuracy against --boost, .png")
    parser.add_argument("--plot-bits", type=Path, help="accuracy of --kv against the bits of floors, .png")
    args = parser.parse_args()
    presets = {name: resolve_kv(name) for name in args.kv.split(",") if name}
    plans = {name: resolve_kv(name) for name in args.plans}
    percents, rankings = ([part for part in text.split(",") if part] for text in (args.boost, args.rankings))
    points = {f"{percent} % by {ranking}": (percent, ranking) for ranking in rankings for percent in percents}
    if args.eager:
        presets, plans = ({name: replace(kv, eager=True) for name, kv in some.items()} for some in (presets, plans))
    rows = run(presets | plans | {name: boosted(*share) for name, share in points.items()}, args)
    results = [result(name, rows[name], floor_bits(kv)) for name, kv in presets.items()]
    if plans:
        results.append(result(f"mean of {len(plans)} plans", [row for name in plans for row in rows[name]]))
    boosts = [(*share, result(name, rows[name])) for name, share in points.items()]
    table = as_table([*results, *(found for *_, found in boosts)], f"demo, {args.samples} samples a task, greedy")
    print(as_markdown(table))
    if args.output is not None:
        every = [row for mine in rows.values() for row in mine]
        write_file(args.output, render("json", every, table).encode())
    if args.plot is not None and boosts:
        draw(boosts, args.plot)
    if args.plot_bits is not None:
        draw_bits([point(name, found) for name, found in zip(presets, results, strict=False)], args.plot_bits)


if __name__ == "__main__":
    main()
