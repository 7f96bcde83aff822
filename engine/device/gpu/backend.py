"""The backend of a GPU: nothing but ``wait`` and ``check`` waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import DeviceLostError
from ...kv.moves import MoveCommand
from ...kv.table_rows import TableLayout
from ..backend import Captured, StepLimits
from ..command import StepCommand
from ..host_memory import HostMemory
from ..layouts import Ladder
from ..logits import CausalLM, Computed
from ..memory import is_out_of_memory
from ..mover import Dig, Mover
from ..pinned import RowsCopy
from ..sampler import SampledTokens
from .captures import capture_all
from .graphs import Graphs
from .steps import GpuSteps


class GpuBackend:
    """Steps and moves over ``memory``, with CUDA graphs of each; see ``Backend``."""

    def __init__(
        self,
        model: CausalLM,
        memory: Tensor,
        layout: TableLayout,
        ladder: Ladder,
        cuda_graphs: bool,
        dig: Dig | None = None,
        host: HostMemory | None = None,
        deterministic: bool = False,
    ):
        """``dig``: of the memory;  ``host``: memory for blocks that leave it;  ``deterministic``: see ``GpuSteps``."""
        self._device = memory.device
        self.steps = GpuSteps(model, memory, layout, ladder, cuda_graphs, deterministic)
        self.mover = Mover(memory, ladder, Graphs(memory.device) if cuda_graphs else None, dig, host)

    def step(self, command: StepCommand) -> Computed:
        """Enqueues the KV of the command's tokens and the results that it asks for."""
        return self.steps.execute(command)

    def move(self, command: MoveCommand) -> list[RowsCopy]:
        """Enqueues moves; returns checks under way of the blocks that lose dense values."""
        return self.mover.move(command)

    def wait(self, computed: Computed) -> SampledTokens:
        """Blocks until the tokens of a step are on the host."""
        return computed.wait()

    @torch.inference_mode()
    def capture(self, limits: StepLimits) -> Captured | None:
        """Captures every step that ``limits`` allow; ``None`` without graphs."""
        return capture_all(self.steps, limits) if self.steps.has_graphs else None

    def check(self) -> None:
        """Raises ``DeviceLostError`` if the device computes nothing any more, as after an illegal access to memory."""
        try:
            torch.ones(1, device=self._device).sum().item()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise DeviceLostError(
                    f"the device {self._device} is lost: {error}", remedy="Make a new process"
                ) from error
