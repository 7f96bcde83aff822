"""Seconds of a start with all steps captured: ``python -m studies.start_up --shape qwen3-8b --kv auto``.

Then a load of prompts of random lengths runs, from a single request to ``--requests`` at once, and the study says how
many graphs were captured meanwhile. With a full warm-up there are none.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from qkv_engine import SamplingParams
from qkv_engine.config import EngineConfig
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import resolve_kv
from qkv_engine.serving.core import EngineCore
from qkv_engine.serving.submission import Submission
from qkv_engine.startup import start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; the demo model otherwise")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--kv-memory", default=None)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=512, help="mean of a prompt's random length")
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    began_at = time.monotonic()
    started = start(
        EngineConfig(
            model=args.shape,
            kv=resolve_kv(args.kv),
            kv_memory=args.kv_memory,
            max_model_len=args.max_model_len,
            max_num_seqs=args.requests,
            load_format="auto" if args.shape is None else "random",
            warm_up="full",
        )
    )
    print(f"ready in {time.monotonic() - began_at:.1f} s", *started.summary, sep="\n")
    num_graphs = _num_graphs(started.core)
    number = 1
    while number <= args.requests:
        seconds = _run(started.core, number, args.input_len, args.output_len)
        print(f"{number:4} requests: {number * args.output_len / seconds:9,.0f} tok/s")
        number *= 2
    print(f"{_num_graphs(started.core) - num_graphs} graphs captured under load")


def _num_graphs(core: EngineCore) -> int:
    backend: Any = core.runner.backend
    return len(getattr(backend.steps, "_graphs", None) or ())


def _run(core: EngineCore, number: int, input_len: int, output_len: int) -> float:
    """Seconds of ``number`` requests at once."""
    rng = random.Random(number)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    floor = core.runner.cache.ladder.last
    for index in range(number):
        prompt = [rng.randrange(5, 1000) for _ in range(rng.randint(1, 2 * input_len - 1))]
        submission = Submission(f"{number}-{index}", None, prompt, params, output_len, index, [], False, floor=floor)
        core.live[submission.request_id] = submission
        core.add(submission)
    began_at = time.monotonic()
    while core.has_work:
        core.step()
    return time.monotonic() - began_at


if __name__ == "__main__":
    main()
