"""One step's states on a GPU: where they are comes from the tables on the device, and kernels rewrite them there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkv_engine.kernels.block_tables import BlockWords, Placed, entry_words
from qkv_engine.kernels.delta_net import DeltaWeights, StateSpec
from qkv_engine.kernels.delta_net.plan import ChunkWork, StepWork
from qkv_engine.kernels.delta_net.triton import delta_net_chunk_triton, delta_net_step_triton

from ..tables import GroupWords


class GpuStatePlanner:
    """Planner of a step's states over the words of the main group's tables."""

    def __init__(self, memory: Tensor, tables: GroupWords, words: BlockWords, specs: Sequence[StateSpec]):
        """``words``: those of ``tables`` on the device;  ``specs``: of each layer's states."""
        self.memory, self.specs, self._tables, self._words = memory, specs, tables, words

    @property
    def num_states(self) -> int:
        """States of a request."""
        return self._tables.section.num_states

    def plan_steps(self, placed: Placed, number: int) -> StepWork:
        """The plan of the first ``number`` tokens, each of a request of its own."""
        section, rows = self._tables.section, placed.rows[:number]
        words = entry_words(self._words, rows, section.first_state, section.num_states)
        return StepWork(words, placed.lengths[:number])

    def plan_chunks(self, rows: list[int], starts: list[int], counts: list[int]) -> ChunkWork:
        """The plan, on the host, of chunks of ``counts`` tokens from ``starts`` of the requests in ``rows``."""
        return ChunkWork.build([self._tables.states(row) for row in rows], starts, counts)


class GpuStates:
    """The states of a step's requests; see ``StateBatch``."""

    def __init__(self, planner: GpuStatePlanner, num_steps: int, steps: StepWork | None, chunks: ChunkWork | None):
        """``steps``: the plan of the first ``num_steps`` tokens, single ones;  ``chunks``: that of the others."""
        self._planner, self._num_steps, self._steps, self._chunks = planner, num_steps, steps, chunks

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        """See ``StateBatch.delta_net``. Rows of padding come out as zeros."""
        n, spec, memory = self._num_steps, self._planner.specs[layer], self._planner.memory
        weights = weights._replace(spec=spec)
        out = qkv.new_empty(len(qkv), spec.num_v_heads, spec.v_dim)
        if self._steps is not None:
            delta_net_step_triton(memory, qkv[:n], z[:n], b[:n], a[:n], weights, self._steps, layer, out[:n])
        if self._chunks is not None:
            delta_net_chunk_triton(memory, qkv[n:], z[n:], b[n:], a[n:], weights, self._chunks, layer, out[n:])
        return out
