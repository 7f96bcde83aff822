"""One step's states on the CPU: those of the step's requests are read and written where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import RUNG_BITS
from qkv_engine.kernels.delta_net import DeltaWeights, StateFormat, StateSpec, StateViews, gated_rms_norm
from qkv_engine.kernels.delta_net.cpu import delta_net_chunk, delta_net_step
from qkv_engine.kernels.delta_net.formats import decode, encode

from ..layouts import Ladder
from ..tables import GroupWords


class Item(NamedTuple):
    """Tokens ``first:last`` of a step, all of one request, with the words of its states, layer by layer.

    ``is_first``: they are its first tokens, before which its states are zeros.
    """

    first: int
    last: int
    states: list[int]
    is_first: bool


class CpuStatePlanner:
    """Planner of a step's states over the words of the main group's tables."""

    def __init__(self, memory: Tensor, tables: GroupWords, ladder: Ladder):
        self.specs, self._dtype = ladder.states, ladder.dtype
        self._memory, self._tables = memory, tables
        self._views: dict[tuple[StateSpec, int], StateViews] = {}  # by word

    def plan(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> CpuStates:
        """The states of the requests in ``rows`` for their next ``lengths`` tokens; single tokens come first."""
        items, first = list[Item](), 0
        for row, start, length in zip(rows, starts, lengths, strict=True):
            items.append(Item(first, first + length, self._tables.states(row), not start))
            first += length
        return CpuStates(self, items)

    def state(self, layer: int, item: Item) -> tuple[StateFormat, StateViews]:
        """The state of an item in one layer, set to zeros before its first token, and the format that it has."""
        key = spec, word = self.specs[layer], item.states[layer]
        form = spec.forms[word & (1 << RUNG_BITS) - 1] if spec.narrower else spec
        state = self._views.get(key)
        if state is None:
            address = word >> RUNG_BITS
            slot = self._memory[address : address + form.nbytes(self._dtype)]
            state = self._views[key] = StateViews.of(slot, form, self._dtype)
        if item.is_first:
            for part in state.parts():
                part.zero_()
        return form.format, state


class CpuStates:
    """The states of a step's items; see ``StateBatch``."""

    def __init__(self, planner: CpuStatePlanner, items: list[Item]):
        self._planner = planner
        self._num_decodes = sum(item.last - item.first == 1 for item in items)
        self._items = items

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        """See ``StateBatch.delta_net``. Rows beyond the step's tokens are padding; they come out as zeros."""
        spec, n = self._planner.specs[layer], self._num_decodes
        out = qkv.new_zeros(len(qkv), spec.num_v_heads, spec.v_dim)
        if n:
            states = [self._planner.state(layer, item) for item in self._items[:n]]
            recurrent, conv = (
                torch.stack(parts) for parts in zip(*((decode(s.recurrent), s.conv) for _, s in states), strict=True)
            )
            out[:n], recurrent, conv = delta_net_step(qkv[:n], b[:n], a[:n], weights, recurrent, conv)
            _write(states, recurrent, conv)
        for item in self._items[n:]:
            part, state = slice(item.first, item.last), self._planner.state(layer, item)
            recurrent, conv = decode(state[1].recurrent), state[1].conv
            out[part], recurrent, conv = delta_net_chunk(qkv[part], b[part], a[part], weights, recurrent, conv)
            _write([state], recurrent[None], conv[None])
        return gated_rms_norm(out, z, weights.norm, weights.eps)


def _write(states: Sequence[tuple[StateFormat, StateViews]], recurrent: Tensor, conv: Tensor) -> None:
    """Stores the states of B requests, each in its format: ``recurrent`` [B, HV, DK, DV] float32 and ``conv``.

    Those of equal formats are encoded together.
    """
    for fmt in dict.fromkeys(fmt for fmt, _ in states):
        rows = [i for i, (own, _) in enumerate(states) if own is fmt]
        new = StateViews(encode(recurrent[rows] if len(rows) < len(states) else recurrent, fmt), conv)
        for i, row in enumerate(rows):
            elements, scales, target = *states[row][1].recurrent, states[row][1].conv
            elements.copy_(new.recurrent.elements[i])
            if scales is not None and new.recurrent.scales is not None:
                scales.copy_(new.recurrent.scales[i])
            target.copy_(conv[row])
