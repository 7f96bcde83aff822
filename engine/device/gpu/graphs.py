"""CUDA graphs: work is captured when its key comes a second time, and replayed from then on."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable

import torch

logger = logging.getLogger("qkv_engine")

MAX_GRAPHS = 512  # kept at once; a graph of 36 layers takes about 1 MiB of device memory


class Graphs:
    """An LRU cache of CUDA graphs by key. One thread, one stream.

    All graphs share one memory pool, so nothing that a graph leaves there outlives the next replay: results belong in
    tensors made outside. After a failed capture all work runs without graphs.
    """

    def __init__(self, device: torch.device):
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._met: set[Hashable] = set()  # keys of work that was run once
        self._ran: set[Hashable] = set()  # kernels that are compiled and loaded
        self._works = True

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Enqueues ``work``, which may depend on ``key`` and on the contents of fixed tensors alone."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        work()
        if key in self._met:  # a capture takes several steps' time, which a key that never returns would not repay
            self._capture(key, work)
        self._met.add(key)

    def capture(self, key: Hashable, work: Callable[[], None], kernels: Collection[Hashable]) -> None:
        """Captures ``work``, which is run before unless all its ``kernels`` have run.

        ``kernels``: names of what ``work`` launches, whatever the sizes of grids; a kernel that never ran would be
        compiled, and memory outside the pool be made, in the middle of the capture.
        """
        if not self._ran.issuperset(kernels):
            work()
            self._ran.update(kernels)
        self._capture(key, work)

    def _capture(self, key: Hashable, work: Callable[[], None]) -> None:
        if not self._works:
            return
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
