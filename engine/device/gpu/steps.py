"""Steps on a GPU. Nothing here waits for the device.

A step that consists of single tokens alone is padded to one of few sizes and replayed as a CUDA graph, from its input
to the tokens it samples. So is a step with chunks of prompts, up to its hidden states, if ``mixed.py`` has a
shape for it. Any other step is run operator by operator, over the same tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import input_nwords, pack_tokens
from qkv_engine.kernels.delta_net.plan import ChunkWork
from qkv_engine.kernels.paged_decode.split import Bounds
from qkv_engine.kernels.paged_decode.triton import kernel_names
from qkv_engine.kernels.sample import sample
from qkv_engine.kernels.to_device import to_device

from ...kv.table_rows import TableLayout
from ..command import StepCommand, Tokens
from ..layouts import Ladder
from ..logits import CausalLM, Computed, compute_hidden, read_hidden, wanted_rows
from ..pinned import HostCopies, PinnedRing
from ..sampler import PendingTokens, sample_tokens
from ..tables import DeviceTables
from .attention import ChunkPlans, GpuAttentionPlanner
from .graphs import Graphs
from .mixed import MixedShape, MixedSteps


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The key of a captured step of single tokens: its rows, and the launch shape of its attention."""

    batch: int
    bounds: Bounds

    @property
    def num_rows(self) -> int:
        """Rows of the step's matrix products."""
        return self.batch

    @property
    def kernels(self) -> list[Hashable]:
        """Names of the kernels that the step launches: those that depend on its rows have one name."""
        return [("decode", self.batch), *kernel_names(self.bounds, self.batch)]


class GpuSteps:
    """Carries out commands on a GPU over ``memory``; owns device tables, input and output buffers, CUDA graphs."""

    def __init__(
        self,
        model: CausalLM,
        memory: Tensor,
        layout: TableLayout,
        ladder: Ladder,
        cuda_graphs: bool,
        deterministic: bool = False,
    ):
        """``deterministic``: a token has the same bits whatever is beside it, if the model's products give them so."""
        self.model, self.device = model, memory.device
        self.tables = DeviceTables(layout, ladder.spec, self.device)
        config = model.config.share(model.ranks.size)
        self.planner = GpuAttentionPlanner(
            memory, self.tables, ladder, config.attention, deterministic, config.last_attention
        )
        self._graphs = Graphs(self.device) if cuda_graphs else None
        self.mixed: MixedSteps | None = None
        if self._graphs is not None:
            self.mixed = MixedSteps(model, self.tables, self.planner, self._graphs, layout.num_rows)
        most = padded_batch(layout.num_rows)
        self._input = torch.zeros(input_nwords(most), dtype=torch.int64, device=self.device)
        self._pinned = PinnedRing(self._input)
        self._sampled = torch.zeros(2 * most, dtype=torch.int64, device=self.device)
        self._copies = HostCopies(self._sampled)
        self._logits: Tensor | None = None  # [most, V], made by the first step
        self._most = most
        # State of the last command: its table rows; for a decode step the token words of the first step of its run, the
        # padded batch size, the steps since then, and the view of the output.
        self._rows: list[int] = []
        self._tokens, self._batch = pack_tokens((), (), ()), 0
        self._advance = 0
        self._likeliest = self._sampled

    @property
    def has_graphs(self) -> bool:
        """Whether steps are captured."""
        return self._graphs is not None

    def execute(self, command: StepCommand) -> Computed:
        """Enqueues the KV of the command's tokens and the results that it asks for.

        The token of each item that samples becomes its row's last one.
        """
        if command.changes:
            self.tables.apply(command.changes)
        self.tables.num_blocks = command.num_blocks
        if not command.goes_on:
            self._rows = command.rows
        if command.is_decode:
            return self._execute_decode(command)
        computed = read_hidden(self.model, self._hidden(command), command)
        if computed.tokens is not None:
            self._keep_tokens(command.sampling, computed.tokens.token_ids)
        return computed

    def capture(self, shape: DecodeShape | MixedShape) -> None:
        """Captures a step, which is run with padding alone. Needs graphs."""
        assert self._graphs is not None
        if isinstance(shape, MixedShape):
            assert self.mixed is not None
            self.mixed.capture(shape)
            return
        padding = Tokens.single().padded(shape.batch, self.tables.spare_row)
        self._pinned.send(self.tables.step_input(padding.packed()))
        kernels = [*shape.kernels, *self.planner.window_kernels(shape.batch)]
        self._graphs.capture(shape, lambda: self._decode(shape), kernels)

    def _execute_decode(self, command: StepCommand) -> Computed:
        """A step of single tokens alone: likeliest tokens come from its graph, all others from the sampler."""
        logits, sampling = self._decode_logits(command), command.sampling
        if command.tables is None:
            return Computed(PendingTokens(self._likeliest, self._copies.begin(2, self._batch)), True, {})
        if len(sampling) < len(logits):
            logits = logits[to_device(torch.tensor(sampling), self.device)]
        tokens = sample_tokens(logits, command.tables)
        self._keep_tokens(sampling, tokens.token_ids)
        return Computed(tokens, False, {})

    def _decode_logits(self, command: StepCommand) -> Tensor:
        """Logits [N, V] of a step of single tokens alone; the next step overwrites them."""
        number = len(self._rows)
        if command.goes_on:
            self._advance += 1
            # The tokens are on the device, whether the host knows them by now or not.
            self._tokens[:number] = array("q", [-1]) * number
        else:
            self._batch, self._advance = padded_batch(number), 0
            self._likeliest = self._sampled[: 2 * self._batch].view(2, self._batch)
            tokens = Tokens.single(command.rows, command.starts, command.ids)
            self._tokens = tokens.padded(self._batch, self.tables.spare_row).packed()
        item_blocks, bounds = self.planner.split(number, self._batch)
        self._pinned.send(self.tables.step_input(self._tokens, self._advance, item_blocks))
        shape = DecodeShape(self._batch, bounds)
        if self._graphs is None:
            self._decode(shape)
        else:
            self._graphs.run(shape, lambda: self._decode(shape))
        assert self._logits is not None
        return self._logits[:number]

    def _hidden(self, command: StepCommand) -> Tensor:
        """Hidden states [M, E] of the ``wanted_rows`` of a command, which has single tokens first."""
        rows, starts, lengths = command.rows, command.starts, command.lengths
        wanted = wanted_rows(command, lengths, self.device)
        number = sum(length == 1 for length in lengths)
        decodes = Tokens.single(rows[:number], starts[:number], command.ids[:number])
        others = rows[number:], starts[number:], lengths[number:]
        chunks = Tokens.of(*others, command.ids[number:])
        if not chunks.ids:
            return self._forward(wanted, decodes, chunks)
        plans, states = self.planner.plan_chunks(*others), self.planner.states
        state_chunks = None if states is None else states.plan_chunks(*others)
        found = None if self.mixed is None else self.mixed.shape(number, len(chunks.ids), plans, state_chunks)
        if self.mixed is None or found is None:
            return self._forward(wanted, decodes, chunks, plans, state_chunks)
        hidden = self.mixed.run(*found, decodes, chunks, plans, state_chunks)
        return hidden if wanted is None else hidden[to_device(wanted, self.device)]

    def _keep_tokens(self, sampling: Sequence[int], token_ids: Tensor) -> None:
        """Stores ``token_ids`` [N], on the device, as the last tokens of the items ``sampling``."""
        rows = to_device(torch.tensor([self._rows[i] for i in sampling]), self.device)
        self.tables.last_tokens.index_copy_(0, rows, token_ids)

    def _forward(
        self,
        wanted: Tensor | None,
        decodes: Tokens,
        chunks: Tokens,
        plans: ChunkPlans | None = None,
        state_chunks: ChunkWork | None = None,
    ) -> Tensor:
        """Hidden states of the tokens ``wanted``, ``None`` for all, of a step that is run operator by operator."""
        number, num_decodes = len(decodes.ids) + len(chunks.ids), len(decodes.ids)
        item_blocks, bounds = self.planner.split(num_decodes, num_decodes) if num_decodes else (1, None)
        words = self.tables.step_input(decodes.packed(chunks), item_blocks=item_blocks)
        step_input = to_device(torch.frombuffer(words, dtype=torch.int64), self.device)
        rows = None if wanted is None else to_device(wanted, self.device)
        on_device, last = None, None
        if plans is not None:
            on_device = [work.to(self.device) for work in plans]
            if wanted is not None and len(wanted) < number:
                last = self.planner.plan_last(plans, wanted - num_decodes, on_device)
        states = None if state_chunks is None else state_chunks.to(self.device)
        placed, step = self.planner.begin(step_input, number, num_decodes, bounds, on_device, states, last)
        return compute_hidden(self.model, placed.input_ids, placed.positions, step, rows)

    def _decode(self, shape: DecodeShape) -> None:
        """The device's work in a step of single tokens, from ``_input`` to ``_sampled``: the contents of a graph."""
        batch = shape.batch
        placed, step = self.planner.begin(self._input, batch, batch, shape.bounds)
        logits = self.model.compute_logits(self.model(placed.input_ids, placed.positions, step))
        if self._logits is None:
            self._logits = logits.new_empty(self._most, logits.shape[1])
        self._logits[:batch].copy_(logits)
        sampled = sample(logits)
        self._sampled[: 2 * batch].view(2, batch).copy_(sampled)
        self.tables.last_tokens.index_copy_(0, placed.rows, sampled[0])


def padded_batch(num_rows: int) -> int:
    """Rows of the graph for ``num_rows``: 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, then eight sizes an octave.

    Up to 128 rows products take as long as their weights take to be read. Beyond, fewer sizes would compute up to a
    quarter more rows for nothing.
    """
    octave = 1 << (num_rows - 1).bit_length()
    step = octave if octave <= 32 else octave // 4 if octave <= 128 else octave // 16
    return -(-num_rows // step) * step
