"""The backend of an engine: it carries out commands over KV memory, on a CPU, a GPU or all ranks of a group."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..kv.moves import MoveCommand
from .command import StepCommand
from .logits import Computed
from .mover import MoveBackend
from .pinned import RowsCopy
from .sampler import SampledTokens


class StepLimits(NamedTuple):
    """The limits of an engine that bound the shapes of its steps."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


class Captured(NamedTuple):
    """The number of steps captured, the seconds that took, and the bytes of device memory that the steps take."""

    number: int
    seconds: float
    nbytes: int


class Backend(MoveBackend, Protocol):
    """Carries out steps and moves. Nobody else knows its plans, graphs and buffers."""

    def step(self, command: StepCommand) -> Computed:
        """Enqueues the KV of the command's tokens and the results that it asks for."""

    def wait(self, computed: Computed) -> SampledTokens:
        """Blocks until the tokens of a step are on the host. May be called once a step."""

    def capture(self, limits: StepLimits) -> Captured | None:
        """Captures every step that ``limits`` allow; ``None`` where nothing is captured."""

    def check(self) -> None:
        """Raises ``DeviceLostError`` if the device computes nothing any more, as after an illegal access to memory.

        Raises ``RankLostError`` if the process of another rank ended.
        """


class NoBackend:
    """The backend of an engine that sleeps, which nobody asks for anything."""

    def step(self, command: StepCommand) -> Computed:
        """Raises ``RuntimeError``."""
        raise RuntimeError("the engine sleeps")

    def move(self, command: MoveCommand) -> list[RowsCopy]:
        """Raises ``RuntimeError``."""
        raise RuntimeError("the engine sleeps")

    def wait(self, computed: Computed) -> SampledTokens:
        """Raises ``RuntimeError``."""
        raise RuntimeError("the engine sleeps")

    def capture(self, limits: StepLimits) -> Captured | None:
        """Captures nothing."""
        return None

    def check(self) -> None:
        """Nothing: no device is held."""
