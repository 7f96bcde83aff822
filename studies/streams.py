"""Cost of readers: ``python -m studies.streams --shape qwen3-8b --requests 256``.

The same requests run once unwatched, by ``Engine.generate``, and once read step by step, by ``generate_async`` in one
event loop, in turns. Random token ids; the median of ``--repeats`` runs counts.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from qkv_engine import Engine
from qkv_engine.models.shapes import SHAPES

from .http_load import Load, generated, streamed


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
    load, seconds = Load(args.requests, args.input_len, args.output_len), dict[str, list[float]]()
    with Engine(
        args.shape,
        kv=args.kv,
        kv_memory=args.kv_memory,
        max_num_seqs=args.requests,
        prefix_caching=False,
        load_format="auto" if args.shape is None else "random",
    ) as engine:
        for _ in range(1 + args.repeats):
            for name, run in (("unwatched", generated), ("streamed", streamed)):
                start = time.perf_counter()
                run(engine, load, seed=0)
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    runs = {name: found[1:] for name, found in seconds.items()}  # graphs are captured in the first
    for name, found in runs.items():
        each = ", ".join(f"{one:.2f} s" for one in found)
        print(f"{name:10} {load.num_tokens / median(found):9,.0f} tok/s  runs {each}")
    print(f"streamed / unwatched: {median(runs['unwatched']) / median(runs['streamed']):.3f}")


if __name__ == "__main__":
    main()
