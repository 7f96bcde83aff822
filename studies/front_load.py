"""Core seconds of each process between a replica and its clients, an event of a stream: the size of a front.

``python -m studies.front_load --port 8000`` beside ``qkv-engine serve --port 8000``, with or without ``--replicas N``.
Counts the processes of this machine whose command line has one of ``PARTS``; a replica's share is mostly its model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import httpx

PARTS = {"proxy": "ray::ProxyActor", "front": "ServeReplica:qkv-engine:Front", "replica": "qkv-engine:Replica"}
TICKS = os.sysconf("SC_CLK_TCK")  # a second, of the kernel's process times


def core_seconds() -> dict[str, float]:
    """Processor time so far by part."""
    found = dict.fromkeys(PARTS, 0.0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        for name, mark in PARTS.items():
            if mark in command:
                found[name] += (int(fields[11]) + int(fields[12])) / TICKS
    return found


async def stream(client: httpx.AsyncClient, number: int, length: int) -> tuple[int, int]:
    """The events and the bytes of one stream."""
    body = {"prompt": f"{number} apples", "max_tokens": length, "ignore_eos": True, "stream": True}
    events = size = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for chunk in answer.aiter_bytes():
            events, size = events + chunk.count(b"data: "), size + len(chunk)
    return events, size


async def run(port: int, streams: int, length: int) -> list[tuple[int, int]]:
    """All streams at once."""
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:
        return await asyncio.gather(*(stream(client, number, length) for number in range(streams)))


def main() -> None:
    """Prints events a second, bytes an event, and microseconds of a core by part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=256)
    args = parser.parse_args()
    asyncio.run(run(args.port, args.streams, 8))
    before, begin = core_seconds(), time.perf_counter()
    answers = asyncio.run(run(args.port, args.streams, args.output_len))
    seconds, after = time.perf_counter() - begin, core_seconds()
    events, size = (sum(counts) for counts in zip(*answers, strict=True))
    print(f"{events:,} events in {seconds:.1f} s: {events / seconds:,.0f} a second, {size / events:,.0f} bytes each")
    for name in PARTS:
        print(f"{name}: {1e6 * (after[name] - before[name]) / events:,.0f} us of a core an event")


if __name__ == "__main__":
    main()
