"""The backend of a device: it carries out steps over one rank's KV memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kv.table_rows import TableLayout
from .command import StepCommand
from .cpu.steps import CpuSteps
from .layouts import Ladder
from .logits import CausalLM, Computed


class Steps(Protocol):
    """Carries out steps. Nobody else knows its plans, graphs and buffers."""

    def execute(self, command: StepCommand) -> Computed: ...


def make_steps(model: CausalLM, memory: Tensor, layout: TableLayout, ladder: Ladder, cuda_graphs: bool) -> Steps:
    """The backend of the device on which ``memory`` is, over block tables of ``layout``."""
    if memory.is_cpu:
        return CpuSteps(model, memory, layout, ladder)
    from .gpu.steps import GpuSteps  # needs Triton

    return GpuSteps(model, memory, layout, ladder, cuda_graphs)
