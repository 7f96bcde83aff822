"""Steps on a CPU, each computed when ``execute`` returns."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from qkv_engine.kernels.linear import padded_rows

from ...kv.table_rows import TableLayout
from ..command import StepCommand, Tokens
from ..hybrid_step import HybridStep
from ..layouts import Ladder
from ..logits import CausalLM, Computed, asked_tokens, compute_hidden, read_hidden, wanted_rows
from ..tables import HostTables
from .attention import CpuAttentionPlanner
from .states import CpuStatePlanner


class CpuSteps:
    """Carries out commands on a CPU over ``memory``; owns a copy of the block tables and the plan of attention."""

    def __init__(
        self, model: CausalLM, memory: Tensor, layout: TableLayout, ladder: Ladder, deterministic: bool = False
    ):
        """``deterministic``: a token has the same bits whatever is beside it, if the model's products give them so."""
        self.model = model
        self._tables = HostTables(layout)
        config = model.config
        self._planner = CpuAttentionPlanner(
            memory, self._tables, ladder, config.attention, deterministic, config.last_attention
        )
        main = self._tables.groups[ladder.groups.index(ladder.main)]
        self._states = CpuStatePlanner(memory, main, ladder) if ladder.states else None
        # The last command's items, and its tokens with padding.
        self._rows, self._starts, self._lengths, self._num_tokens = list[int](), list[int](), list[int](), 0
        self._ids = self._positions = self._sampled = torch.zeros(0, dtype=torch.int64)
        self._is_padded = False
        self._order: Tensor | None = None  # of single tokens: that of their blocks, in which they are computed
        self._places: Tensor | None = None  # of the command's items in it, and behind them of padding

    def execute(self, command: StepCommand) -> Computed:
        """Computes the KV of the command's tokens and the results that it asks for."""
        if command.changes:
            self._tables.apply(command.changes)
            self._planner.forget()
        if command.goes_on:
            self._go_on()
        else:
            self._begin(command)
        asked = asked_tokens(command, self._lengths) if self._lengths[-1] > 1 else None
        step = self._planner.plan(self._rows, self._starts, self._lengths, goes_on=command.goes_on, asked=asked)
        if self._states is not None:
            step = HybridStep(step, self._states.plan(self._rows, self._starts, self._lengths))
        rows = wanted_rows(command, self._lengths, self._ids.device)
        if self._places is not None:
            rows = self._places if rows is None else self._places[rows]
        hidden = compute_hidden(self.model, self._ids, self._positions, step, rows)
        computed = read_hidden(self.model, hidden, command)
        if computed.tokens is not None:
            self._sampled = computed.tokens.token_ids
        return computed

    def _begin(self, command: StepCommand) -> None:
        self._rows, self._starts, self._lengths, ids = command.rows, command.starts, command.lengths, command.ids
        self._order = self._places = None
        order = self._planner.order(command.rows, command.starts) if command.lengths[-1] == 1 else []
        if order != sorted(order):
            self._rows, self._starts, ids = ([values[i] for i in order] for values in (self._rows, self._starts, ids))
            self._order = torch.tensor(order)
        tokens = Tokens.of(self._rows, self._starts, self._lengths, ids)
        self._num_tokens = len(tokens.ids)
        num_rows = padded_rows(self._num_tokens, self._ids.device)
        if self._order is not None:
            self._places = torch.cat((self._order.argsort(), torch.arange(self._num_tokens, num_rows)))
        padding = array("q", [0]) * (num_rows - self._num_tokens)
        self._is_padded = bool(padding)
        columns = (torch.frombuffer(column + padding, dtype=torch.int64) for column in (tokens.ids, tokens.positions))
        self._ids, self._positions = columns

    def _go_on(self) -> None:
        self._starts = [start + 1 for start in self._starts]
        self._positions += 1  # of padding, too
        sampled = self._sampled if self._order is None else self._sampled[self._order]
        if self._is_padded:
            self._ids[: self._num_tokens] = sampled
        else:
            self._ids = sampled
