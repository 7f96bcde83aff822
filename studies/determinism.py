"""What a deterministic engine costs: ``python -m studies.determinism --kv bf16,int8 --batch 1,64``.

Two engines, one of them deterministic, decode near ``--context`` tokens by turns of a few steps over filled KV memory,
then read prompts by turns. Prints the median time of each and the median of a turn's ratios: on a GPU seconds on the
wall, on a CPU those of the process, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch

from qkv_engine import Engine, SamplingParams
from qkv_engine.bench.filled import FilledEngine, spread_prompts
from qkv_engine.config import BLOCK_TOKENS, EngineConfig
from qkv_engine.presets import resolve_kv

PROMPT_ROUNDS = 5
Timed = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help='folder, Hub name, or with --random a shape such as "qwen3-8b"')
    add("--random", action="store_true", help="random weights")
    add("--kv", default="bf16", help="presets")
    add("--kv-memory", default="1GiB")
    add("--batch", default="1,64", help="requests at once")
    add("--context", default="192,1024", help="tokens of a request, spread by a block")
    add("--alike", action="store_true", help="requests of one length")
    add("--turns", type=int, default=15)
    add("--steps", type=int, default=4, help="of a turn")
    add("--num-threads", type=int, default=1, help="of a CPU")
    args = parser.parse_args()
    options: dict[str, Any] = {"kv_memory": args.kv_memory, "num_threads": args.num_threads, "prefix_caching": False}
    if args.model != "demo":
        options |= {"model": args.model, "load_format": "random" if args.random else "auto"}
    print(f"{'kv':<12} {'batch':>5} {'context':>7} {'part':<8} {'as usual':>10} {'deterministic':>14} {'ratio':>6}")
    for kv in args.kv.split(","):
        for batch in map(int, args.batch.split(",")):
            for context in map(int, args.context.split(",")):
                compare_steps(kv, batch, context, args, options)
                compare_prompts(kv, batch, context, options)


def compare_steps(kv: str, batch: int, context: int, args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Prints times of steps; the first turn, in which kernels are compiled, is left out."""
    num_steps = args.steps * (args.turns + 1)
    longest = context + BLOCK_TOKENS + num_steps
    with ExitStack() as closing:
        timed = list[Timed]()
        for is_steady in (False, True):
            config = EngineConfig(
                kv=resolve_kv(kv),
                deterministic=is_steady,
                max_model_len=longest + 1,
                max_num_seqs=batch,
                max_num_batched_tokens=max(2048, batch),
                **options,
            )
            engine = closing.enter_context(FilledEngine(config))
            lengths = [context] * batch if args.alike else spread_prompts(batch, context, longest)
            engine.begin(lengths, longest)
            timed.append(partial(engine.seconds_per_step, args.steps))
        show(f"{kv:<12} {batch:>5} {context:>7} step    ", by_turns(timed, args.turns), 1e3 / args.steps, "ms")


def compare_prompts(kv: str, batch: int, context: int, options: dict[str, Any]) -> None:
    """Prints times of ``batch`` random prompts with a token of output each."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 1000) for _ in range(context)] for _ in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with Engine(kv=kv, **options) as usual, Engine(kv=kv, deterministic=True, **options) as steady:
        timed: list[Timed] = [partial(engine.generate, prompts, params) for engine in (usual, steady)]
        show(f"{kv:<12} {batch:>5} {context:>7} prompts ", by_turns(timed, PROMPT_ROUNDS), 1.0, "s")


def by_turns(timed: list[Timed], turns: int) -> list[list[float]]:
    """Seconds of each in each turn but the first."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    found = list[list[float]]()
    for _ in range(turns + 1):
        row = list[float]()
        for each in timed:
            start = clock()
            each()
            row.append(clock() - start)
        found.append(row)
    return found[1:]


def show(head: str, turns: list[list[float]], scale: float, unit: str) -> None:
    """Prints the medians of both engines, and of their ratios."""
    usual, steady = (f"{median(row[number] for row in turns) * scale:.3f} {unit}" for number in range(2))
    print(f"{head} {usual:>10} {steady:>14} {median(row[1] / row[0] for row in turns):>6.2f}", flush=True)


if __name__ == "__main__":
    main()
