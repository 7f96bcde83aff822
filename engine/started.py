"""A started engine: its core, and the facts about it that its callers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qkv_engine.models.config import ModelConfig

from .device.cpu.thread_choice import ThreadChoice
from .device.layouts import Ladder
from .request import SamplingParams
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .device.host_disk import HostDisk
    from .parallel.worker_group import WorkerGroup
    from .serving.core import EngineCore
    from .sleeping import Waker


@dataclass(frozen=True)
class Started:
    """A core ready to run, and the facts about it that its callers need."""

    core: EngineCore
    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    ladder: Ladder
    threads: ThreadChoice  # CPU threads of the engine's own thread
    summary: list[str]
    waker: Waker
    disk: HostDisk | None = None  # the KV store behind host memory
    workers: WorkerGroup | None = None  # the other ranks under tensor parallelism

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return 1 if self.workers is None else self.workers.ranks.size
