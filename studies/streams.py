"""Cost of readers: ``python -m studies.streams --shape qwen3-8b --requests 256``.

The same requests run once unwatched, by ``Engine.generate``, and once read step by step, by ``generate_async`` in one
event loop, in turns. Random token ids; the median of ``--repeats`` runs counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from statistics import median

from qkv_engine import Engine, SamplingParams
from qkv_engine.models.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; the demo model otherwise")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--kv-memory", default=None)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 1000) for _ in range(args.input_len)] for _ in range(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    with Engine(
        args.shape,
        kv=args.kv,
        kv_memory=args.kv_memory,
        max_num_seqs=args.requests,
        prefix_caching=False,
        load_format="auto" if args.shape is None else "random",
    ) as engine:

        def unwatched() -> None:
            engine.generate(prompts, params)

        def streamed() -> None:
            asyncio.run(_read_all(engine, prompts, params))

        unwatched()  # graphs are captured
        streamed()
        runs: dict[str, list[float]] = {"unwatched": [], "streamed": []}
        for _ in range(args.repeats):
            runs["unwatched"].append(_seconds(unwatched))
            runs["streamed"].append(_seconds(streamed))
    tokens = args.requests * args.output_len
    for name, seconds in runs.items():
        print(f"{name:10} {tokens / median(seconds):9,.0f} tok/s  runs {', '.join(f'{s:.2f} s' for s in seconds)}")
    print(f"streamed / unwatched: {median(runs['unwatched']) / median(runs['streamed']):.3f}")


async def _read_all(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    async def read(prompt: list[int]) -> None:
        async for _ in engine.generate_async(prompt, params):
            pass

    await asyncio.gather(*map(read, prompts))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
