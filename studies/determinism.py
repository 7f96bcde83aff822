"""What a deterministic engine costs: ``python -m studies.determinism --kv bf16,int8 --batch 1,64``.

Two engines, one of them deterministic, read prompts and decode by turns. Prints the median time of each part and its
ratio: on a GPU seconds on the wall, on a CPU those of the process, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import Any, NamedTuple

import torch

from qkv_engine import Engine, SamplingParams


class Times(NamedTuple):
    """Seconds of a step that decodes, and of all prompts together."""

    step: float
    prompts: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help='folder, Hub name, or with --random a shape such as "qwen3-8b"')
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--kv", default="bf16", help="presets")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--batch", default="1,64", help="requests at once")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--num-threads", type=int, default=1, help="of a CPU")
    args = parser.parse_args()
    options: dict[str, Any] = {"kv_memory": args.kv_memory, "num_threads": args.num_threads, "prefix_caching": False}
    if args.model != "demo":
        options |= {"model": args.model, "load_format": "random" if args.random else "auto"}
    print(f"{'kv':<12} {'batch':>5} {'part':<8} {'as usual':>10} {'deterministic':>14} {'ratio':>6}")
    for kv in args.kv.split(","):
        with Engine(kv=kv, **options) as usual, Engine(kv=kv, deterministic=True, **options) as steady:
            for batch in map(int, args.batch.split(",")):
                compare(kv, (usual, steady), batch, args)


def compare(kv: str, engines: tuple[Engine, Engine], batch: int, args: argparse.Namespace) -> None:
    """Prints the medians of some turns; the first turn, in which kernels are compiled, is left out."""
    found = list[tuple[Times, ...]]()
    for turn in range(args.turns + 1):
        found.append(tuple(measure(engine, batch, args, turn) for engine in engines))
    for part, scale, unit in (("step", 1e3, "ms"), ("prompts", 1, "s")):
        seconds = [median(getattr(times[i], part) for times in found[1:]) for i in range(2)]
        ratio = median(getattr(times[1], part) / getattr(times[0], part) for times in found[1:])
        shown = [f"{value * scale:.3f} {unit}" for value in seconds]
        print(f"{kv:<12} {batch:>5} {part:<8} {shown[0]:>10} {shown[1]:>14} {ratio:>6.2f}", flush=True)


def measure(engine: Engine, batch: int, args: argparse.Namespace, seed: int) -> Times:
    """Times of ``batch`` random prompts with one token of output each, and with more."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 1000) for _ in range(args.input_len)] for _ in range(batch)]
    prefill, whole = (_seconds(engine, prompts, 1 + number) for number in (0, args.output_len))
    return Times((whole - prefill) / args.output_len, prefill)


def _seconds(engine: Engine, prompts: list[list[int]], output_len: int) -> float:
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start = clock()
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True))
    return clock() - start


if __name__ == "__main__":
    main()
