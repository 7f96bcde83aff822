"""The ranks of a tensor-parallel group as processes of one machine, which exchange tensors by NCCL or gloo."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
)

from qkv_engine.models.ranks import Ranks

from .watch import Progress

# Of an exchange: longer than any step. A rank that ended, or stands still, is noticed by its process, long before.
EXCHANGE_TIMEOUT = timedelta(hours=24)

# For NCCL to give up an exchange once no graph holds any: later, its thread may outlive the interpreter and abort it.
ABORT_SECONDS = 10.0


@dataclass(frozen=True)
class ProcessRanks(Ranks):
    """A rank among processes. The group is no default of ``torch.distributed``, which a caller's own code may use."""

    backend: Any = None  # of torch.distributed; builds of torch without CUDA have no type for NCCL's
    progress: Progress = field(default_factory=Progress, repr=False)
    _aborts: list[Thread] = field(default_factory=list, repr=False)

    @classmethod
    def join(cls, rank: int, size: int, store: Store, device: torch.device) -> ProcessRanks:
        """Joins the group of ``size`` ranks that meets at ``store``; returns when all have."""
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL  # builds without CUDA have none

            options = ProcessGroupNCCL.Options()
            options._timeout = EXCHANGE_TIMEOUT
            backend: Any = ProcessGroupNCCL(store, rank, size, options)
        else:
            backend = ProcessGroupGloo(store, rank, size, EXCHANGE_TIMEOUT)
        ranks = cls(rank, size, backend)
        ranks.sum(torch.ones(1, device=device))  # NCCL connects at its first exchange, which must not be in a graph
        return ranks

    def sum(self, x: Tensor) -> Tensor:
        """See ``Ranks``."""
        options = AllreduceOptions()
        options.asyncOp = False  # on the current stream
        self._wait(self.backend.allreduce([x], options))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See ``Ranks``."""
        parts = x.new_empty(self.size * x.shape[0], x.shape[1])
        options = AllgatherOptions()
        options.asyncOp = False
        self._wait(self.backend._allgather_base(parts, x.contiguous(), options))
        return torch.cat(parts.chunk(self.size), dim=1)

    def abort(self) -> None:
        """Ends exchanges that wait for a rank that is gone, soon after this returns. From any thread."""
        # NCCL ends them at once, but returns only when all graphs that hold some are gone.
        thread = Thread(target=self.backend.abort, daemon=True, name="abort")
        thread.start()
        self._aborts.append(thread)  # started: ``leave`` of another thread joins it

    def leave(self) -> None:
        """Leaves the group. Nothing may be exchanged after that, and no graph may hold an exchange."""
        for thread in self._aborts:
            thread.join(ABORT_SECONDS)
        if not self._aborts:
            self.backend.shutdown()

    def _wait(self, work: Any) -> None:
        """Waits for an exchange on a CPU. NCCL's are on the stream, and give nothing to wait for."""
        if work is not None:
            work.wait()
        self.progress.note()
