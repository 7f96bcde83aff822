"""Requests that arrive one by one: ``python -m studies.arrivals --shape qwen3-8b --kv bf16,auto --kv-memory 12GiB``.

Gaps between arrivals are exponential, prompts random token ids, outputs greedy and of one length. A row has output
tokens a second from the first arrival to the last token, TTFT and TPOT at p50 and p99, and the number, p50 and p99 of
steps without and with prompt tokens, without and with demotions. Counters are read every two milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple

from qkv_engine import Engine, RequestOutput, SamplingParams
from qkv_engine.bench.table import as_markdown, from_columns
from qkv_engine.config import resolve_kv
from qkv_engine.models.shapes import SHAPES

POLL_SECONDS = 0.002  # between two looks at the counters
SAME_STEP_SECONDS = 0.0005  # tokens less than this apart count as one step's


class Sample(NamedTuple):
    """The engine's counters at one moment."""

    seconds: float
    demotions: int
    prompt_tokens: int


class Step(NamedTuple):
    """The time from one step's tokens to the next's, in ms, with the counts in between."""

    ms: float
    demotions: int
    prompt_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; the demo model otherwise")
    parser.add_argument("--kv", default="bf16,auto,auto-2", help="presets and plan files")
    parser.add_argument("--kv-memory", default=None)
    parser.add_argument("--rate", type=float, default=16.0, help="arrivals a second")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    columns: dict[str, list[str]] = {}
    for name in args.kv.split(","):
        for field, value in measure(name, args).items():
            columns.setdefault(field, []).append(value)
        print({field: values[-1] for field, values in columns.items()}, flush=True)
    title = f"{args.requests} requests, {args.rate:g} a second, {args.input_len} in, {args.output_len} out"
    print(as_markdown(from_columns(title, columns, [])))


def measure(name: str, args: argparse.Namespace) -> dict[str, str]:
    """The row of one preset or plan."""
    kv = resolve_kv(name)
    with Engine(
        args.shape,
        kv=kv,
        kv_memory=args.kv_memory,
        max_model_len=args.input_len + args.output_len,
        prefix_caching=False,
        load_format="auto" if args.shape is None else "random",
    ) as engine:
        asyncio.run(_run(engine, args, seed=args.seed + 1))  # kernels are compiled, graphs captured
        engine.reset_stats()
        outputs, samples = asyncio.run(_run(engine, args, seed=args.seed))
        stats = engine.stats()
    found = steps(outputs, samples)
    start = min(output.metrics.arrival_time for output in outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    ttfts = [1000 * (o.metrics.token_times[0] - o.metrics.arrival_time) for o in outputs]
    tpots = [1000 * (t[-1] - t[0]) / (len(t) - 1) for t in (output.metrics.token_times for output in outputs)]
    return {
        "kv": kv.name,
        "tok/s": f"{tokens / (max(o.metrics.token_times[-1] for o in outputs) - start):,.0f}",
        "TTFT ms p50 / p99": _two(ttfts),
        "TPOT ms p50 / p99": _two(tpots),
        "preemptions": str(stats.num_preemptions),
        "demotions": str(stats.num_demotions),
        "a step": f"{stats.num_demotions / stats.num_steps:.2f}",
        "decode ms": _ms(found, has_prompt=False, has_moves=False),
        "with demotions": _ms(found, has_prompt=False, has_moves=True),
        "with a prompt ms": _ms(found, has_prompt=True, has_moves=False),
        "with both": _ms(found, has_prompt=True, has_moves=True),
    }


def steps(outputs: Sequence[RequestOutput], samples: Sequence[Sample]) -> list[Step]:
    """The steps of a run in order, apart from the first."""
    times = sorted(t for output in outputs for t in output.metrics.token_times)
    ends = [t for before, t in pairwise([0.0, *times]) if t - before > SAME_STEP_SECONDS]
    moments = [sample.seconds for sample in samples]
    found = []
    for first, last in pairwise(ends):
        a, b = (samples[max(0, bisect_right(moments, moment) - 1)] for moment in (first, last))
        found.append(Step(1000 * (last - first), b.demotions - a.demotions, b.prompt_tokens - a.prompt_tokens))
    return found


async def _run(engine: Engine, args: argparse.Namespace, seed: int) -> tuple[list[RequestOutput], list[Sample]]:
    """All requests, each at its time, and the counters meanwhile."""
    rng, samples = random.Random(seed), list[Sample]()
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    prompts = [[rng.randrange(5, 1000) for _ in range(args.input_len)] for _ in range(args.requests)]
    begin, at = time.monotonic(), 0.0
    moments = [at := at + rng.expovariate(args.rate) for _ in prompts]

    async def serve(prompt: list[int], moment: float) -> RequestOutput:
        await asyncio.sleep(max(0.0, begin + moment - time.monotonic()))
        async for output in engine.generate_async(prompt, params):
            last = output
        return last

    async def watch() -> None:
        while True:
            stats = engine.stats()
            samples.append(Sample(time.monotonic(), stats.num_demotions, stats.prompt_tokens))
            await asyncio.sleep(POLL_SECONDS)

    watcher = asyncio.create_task(watch())
    outputs = await asyncio.gather(*map(serve, prompts, moments))
    watcher.cancel()
    return list(outputs), samples


def _ms(found: Sequence[Step], *, has_prompt: bool, has_moves: bool) -> str:
    """Number, median and 99th percentile of the steps with or without prompt tokens and demotions."""
    ms = [s.ms for s in found if bool(s.prompt_tokens) == has_prompt and bool(s.demotions) == has_moves]
    return f"{len(ms)}: {_two(ms)}"


def _two(values: Sequence[float]) -> str:
    """The median and the 99th percentile."""
    if len(values) < 2:
        return ""
    return f"{median(values):.1f} / {quantiles(values, n=100, method='inclusive')[98]:.1f}"


if __name__ == "__main__":
    main()
