"""CUDA graphs: work captured when it is met again, replayed from then on."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger("qkv_engine")

MAX_GRAPHS = 640  # a graph of 36 layers takes about 1 MiB of device memory


class Graphs:
    """Captured work by key, the least recently used given up first. One thread, one stream.

    All graphs share one pool of memory, so that nothing a graph leaves there outlives the next replay: results belong
    in tensors made outside. Should a capture fail, work is run as it is from then on.
    """

    def __init__(self, device: torch.device):
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._met: set[Hashable] = set()  # work that was run once
        self._works = True

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Enqueues ``work``, which depends on ``key`` and the contents of the same tensors alone."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        if key in self._met:
            self.capture(key, work)  # takes several times as long as a step, and some work is met but once
        else:
            work()
        self._met.add(key)

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Runs ``work``, which compiles its kernels, and captures it."""
        work()
        if self._works:
            self._capture(key, work)

    def _capture(self, key: Hashable, work: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._works = False
            logger.warning("decode steps run without CUDA graphs from now on: %s", error)
            return
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
