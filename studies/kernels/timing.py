"""Device time of kernels by CUDA graph replay and events, so that launches cost no host time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


@torch.inference_mode()  # as the engine runs
def time_calls(calls: Sequence[Callable[[], Any]]) -> float:
    """Median seconds of one call, all ``calls`` being captured one after the other in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    events: Any = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(15)]  # type: ignore[no-untyped-call]
    for _ in range(3):
        graph.replay()
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(s.elapsed_time(e) for s, e in events)) / 1e3 / len(calls)


def time_us(calls: Sequence[Callable[[], Any]], what: str) -> float | None:
    """Microseconds, or None where something fails."""
    try:
        return 1e6 * time_calls(calls)
    except Exception as error:
        print(f"  {what}: {type(error).__name__} {str(error)[:100]}", flush=True)
        return None
