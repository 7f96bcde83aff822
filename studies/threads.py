"""CPU threads beside other work: ``python -m studies.threads --cores 0-3``.

Each setting (threads, OpenMP's way of waiting) decodes in a process of its own, on an idle machine and beside one busy
process, pinned to the same cores. Prints tokens per second: least, median and most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

WAYS: dict[str, Mapping[str, str]] = {  # how OpenMP's threads wait after a parallel region: settings of libgomp
    "default": {},
    "spin 300,000": {"GOMP_SPINCOUNT": "300000"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
REQUESTS, INPUT_LEN = 7, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="demo", help="random weights of this shape")
    parser.add_argument("--cores", default="0-1", help="cores to use, such as 0-3")
    parser.add_argument("--threads", default="1,less,all", help='numbers; "less" is one less than the cores')
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(decode(args.shape, args.worker, args.output_len, args.batch)))
        return
    first, last = map(int, args.cores.split("-"))
    cores = set(range(first, last + 1))
    os.sched_setaffinity(0, cores)
    numbers = {"less": len(cores) - 1, "all": len(cores)}
    threads = dict.fromkeys(numbers[word] if word in numbers else int(word) for word in args.threads.split(","))
    print(f"{args.shape} on {len(cores)} cores")
    print(f"{'threads':>8} {'wait':<12} {'load':<6} {'least':>8} {'median':>8} {'most':>8}")
    for number in threads:
        for name, way in WAYS.items():
            if number == 1 and name != "default":
                continue
            for load in (0, 1):
                with busy(load):
                    found = measure(args, number, way)
                figures = " ".join(f"{value:8.1f}" for value in (min(found), statistics.median(found), max(found)))
                print(f"{number:>8} {name:<12} {'busy' if load else 'idle':<6} {figures}", flush=True)


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Runs ``number`` processes that never sleep, on the same cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(args: argparse.Namespace, threads: int, way: Mapping[str, str]) -> list[float]:
    program = "from studies.threads import main; main()"
    command = [sys.executable, "-c", program, "--worker", str(threads)]
    command += ["--shape", args.shape, "--output-len", str(args.output_len), "--batch", str(args.batch)]
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(command, env={**inherited, **way}, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def decode(shape: str, threads: int, output_len: int, batch: int) -> list[float]:
    """Tokens per second of some batches after one another, the first left out."""
    from qkv_engine import Engine, SamplingParams

    options: dict[str, Any] = (
        {} if shape == "demo" else {"model": shape, "load_format": "random", "max_model_len": 4096}
    )
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    found = []
    with Engine(**options, device="cpu", kv="bf16", kv_memory="1GiB", num_threads=threads) as engine:
        for _ in range(REQUESTS):
            started = time.perf_counter()
            engine.generate([list(range(5, 5 + INPUT_LEN))] * batch, params)
            found.append(batch * output_len / (time.perf_counter() - started))
    return found[1:]


if __name__ == "__main__":
    main()
