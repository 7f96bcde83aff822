"""The backend of a CPU: each command is complete when its call returns."""

from __future__ import annotations

from torch import Tensor

from ...kv.moves import MoveCommand
from ...kv.table_rows import TableLayout
from ..backend import StepLimits
from ..command import StepCommand
from ..host_memory import HostMemory
from ..layouts import Ladder
from ..logits import CausalLM, Computed
from ..mover import Dig, Mover
from ..pinned import RowsCopy
from ..sampler import SampledTokens
from .steps import CpuSteps


class CpuBackend:
    """Steps and moves over ``memory``; see ``Backend``."""

    def __init__(
        self,
        model: CausalLM,
        memory: Tensor,
        layout: TableLayout,
        ladder: Ladder,
        dig: Dig | None = None,
        host: HostMemory | None = None,
        deterministic: bool = False,
    ):
        """``dig``: of the memory;  ``host``: memory for blocks that leave it;  ``deterministic``: see ``CpuSteps``."""
        self.steps = CpuSteps(model, memory, layout, ladder, deterministic)
        self.mover = Mover(memory, ladder, None, dig, host)

    def step(self, command: StepCommand) -> Computed:
        """Computes the KV of the command's tokens and the results that it asks for."""
        return self.steps.execute(command)

    def move(self, command: MoveCommand) -> list[RowsCopy]:
        """Carries out moves; returns checks of the blocks that lose dense values."""
        return self.mover.move(command)

    def wait(self, computed: Computed) -> SampledTokens:
        """The tokens of a step."""
        return computed.wait()

    def capture(self, limits: StepLimits) -> None:
        """Nothing: a CPU has no graphs."""

    def check(self) -> None:
        """Nothing: a CPU is never lost."""
