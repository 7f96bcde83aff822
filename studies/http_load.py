"""Throughput of many streams over HTTP, beside the same load on an embedded engine.

``python -m studies.http_load --concurrency 256 -- --shape qwen3-8b --kv-memory 60GiB``: options after ``--`` are those
of ``qkv-engine serve``. With ``--port 8000`` only the server that runs there is measured. Each run has prompts of its
own, and the first of each kind, which warms up, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from qkv_engine import Engine
from qkv_engine.cli.common import open_engine
from qkv_engine.cli.main import build_parser
from qkv_engine.cli.serve import engine_options

CHUNK = 1 << 16  # bytes that a client reads at once


class Load(NamedTuple):
    """Streams that begin at once, and their lengths in tokens."""

    concurrency: int
    input_len: int
    output_len: int

    def prompts(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(5, 1000) for _ in range(self.input_len)] for _ in range(self.concurrency)]

    @property
    def num_tokens(self) -> int:
        """Output tokens of a run."""
        return self.concurrency * self.output_len


def generated(engine: Engine, load: Load, seed: int) -> None:
    """The load as one batch."""
    params = engine.params(max_tokens=load.output_len, ignore_eos=True, temperature=0.0)
    engine.generate(load.prompts(seed), params)


def streamed(engine: Engine, load: Load, seed: int) -> None:
    """The load as streams in one event loop."""
    params = engine.params(max_tokens=load.output_len, ignore_eos=True, temperature=0.0)

    async def one(prompt: list[int]) -> None:
        async for _ in engine.generate_async(prompt, params):
            pass

    async def run() -> None:
        await asyncio.gather(*(one(prompt) for prompt in load.prompts(seed)))

    asyncio.run(run())


def over_http(address: tuple[str, int], load: Load, seed: int) -> None:
    """The load as streams of as many connections. Raises ``RuntimeError`` for an answer that is not whole."""

    async def one(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": load.output_len, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        answer = await _post(address, json.dumps(body).encode())
        found = re.search(rb'"completion_tokens":(\d+)', answer)
        if found is None or int(found[1]) != load.output_len:
            raise RuntimeError(f"not a whole answer: {answer[-500:]!r}")

    async def run() -> None:
        await asyncio.gather(*(one(prompt) for prompt in load.prompts(seed)))

    asyncio.run(run())


async def _post(address: tuple[str, int], body: bytes) -> bytes:
    """The end of the answer to ``body``; all of it is read."""
    reader, writer = await asyncio.open_connection(*address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    tail = b""
    while part := await reader.read(CHUNK):
        tail = (tail + part)[-2000:]
    writer.close()
    return tail


@contextmanager
def served(words: list[str]) -> Iterator[tuple[tuple[str, int], int]]:
    """A server in a process of its own, with the options ``words``, for the block: its address and process id."""
    command = [sys.executable, "-m", "qkv_engine", "serve", "--port", "0", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                sys.stderr.write(line)
                if found := re.search(r"serving .* on http://([\d.]+):(\d+)", line):
                    yield (found[1], int(found[2])), server.pid
                    return
            raise RuntimeError("the server did not start")
        finally:
            server.terminate()


def measure(name: str, run: Callable[[Load, int], None], load: Load, repeats: int) -> float:
    """Output tokens a second of ``run``, the median of ``repeats`` after one that does not count."""
    rates = []
    for seed in range(repeats + 1):
        begin = time.perf_counter()
        run(load, seed)
        rates.append(load.num_tokens / (time.perf_counter() - begin))
    rate = median(rates[1:])
    print(f"{name:10} {rate:10,.1f} tokens/s   {' '.join(f'{each:,.1f}' for each in rates[1:])}", flush=True)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, help="port of a server that runs on this machine already")
    parser.add_argument("serve", nargs="*", help="options of qkv-engine serve")
    args = parser.parse_args()
    load = Load(args.concurrency, args.input_len, args.output_len)
    if args.port is not None:
        measure("http", lambda *given: over_http(("127.0.0.1", args.port), *given), load, args.repeats)
        return
    serve: Any = build_parser().parse_args(["serve", *args.serve])
    with open_engine(serve, **engine_options(serve)) as engine:
        batch = measure("generate", lambda *given: generated(engine, *given), load, args.repeats)
        streams = measure("streams", lambda *given: streamed(engine, *given), load, args.repeats)
    with served(args.serve) as (address, _):
        http = measure("http", lambda *given: over_http(address, *given), load, args.repeats)
    print(f"http is {http / batch:.3f} of generate, {http / streams:.3f} of streams")


if __name__ == "__main__":
    main()
