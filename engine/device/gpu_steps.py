"""Steps on a GPU. Nothing here waits for the device.

A step that consists of single tokens alone is padded to one of few sizes and replayed as a CUDA graph, from its input
to the tokens it samples. So is a step with chunks of prompts, up to its hidden states, if ``mixed_steps.py`` has a
shape for it. Any other step is run operator by operator, over the same tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv_engine.device.pinned import HostCopies, PinnedRing, to_device
from qkv_engine.kernels.block_tables import input_nwords, pack_tokens
from qkv_engine.kernels.paged_decode.split import Bounds
from qkv_engine.kernels.paged_decode.triton import kernel_names
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.sample import sample
from qkv_engine.scheduler import ScheduledRequest

from ..kv.attention_gpu import GpuAttentionPlanner
from ..kv.cache import KVCache
from ..kv.device_tables import DeviceTables
from ..sampling.sampler import PendingTokens
from .graphs import Graphs
from .mixed_steps import MixedShape, MixedSteps, Tokens, tokens_of

if TYPE_CHECKING:
    from .runner import CausalLM


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
    """Runs steps on a GPU; owns the state they share: device tables, input and output buffers, CUDA graphs."""

    def __init__(self, model: CausalLM, cache: KVCache, max_num_seqs: int, max_model_len: int, cuda_graphs: bool):
        device = cache.memory.device
        self.model, self.cache, self.device = model, cache, device
        self.tables = DeviceTables(cache.tables, max_num_seqs, max_model_len, device)
        self.planner = GpuAttentionPlanner(cache.memory, self.tables, model.config.num_heads)
        self._graphs = Graphs(device) if cuda_graphs else None
        self.mixed: MixedSteps | None = None
        if self._graphs is not None:
            self.mixed = MixedSteps(model, self.tables, self.planner, self._graphs, max_num_seqs)
        most = padded_batch(max_num_seqs)
        self._input = torch.zeros(input_nwords(most), dtype=torch.int64, device=device)
        self._pinned = PinnedRing(self._input)
        self._sampled = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self._copies = HostCopies(self._sampled)
        self._logits: Tensor | None = None  # [most, V], made by the first step
        self._most = most
        # State of the last launch: its table rows; for a decode step the token words of the first step of its run, the
        # padded batch size, the steps since then, and the view of the output.
        self._step_rows: list[int] = []
        self._tokens, self._batch = pack_tokens((), (), ()), 0
        self._advance = 0
        self._likeliest = self._sampled

    def forward(self, items: Sequence[ScheduledRequest]) -> Tensor:
        """Hidden states [N, E] of a step's tokens, single tokens first."""
        rows, num_decodes = self._rows(items), sum(item.num_tokens == 1 for item in items)
        ids, starts = [_token_ids(item) for item in items], [item.start for item in items]
        decodes, chunks = (
            tokens_of(rows[part], ids[part], starts[part]) for part in (slice(num_decodes), slice(num_decodes, None))
        )
        if not chunks.ids:
            return self._forward(decodes, chunks, None)
        counts = [item.num_tokens for item in items[num_decodes:]]
        work = self.planner.plan_chunks(rows[num_decodes:], starts[num_decodes:], counts)
        found = None if self.mixed is None else self.mixed.shape(num_decodes, len(chunks.ids), work)
        if self.mixed is None or found is None:
            return self._forward(decodes, chunks, work)
        return self.mixed.run(*found, decodes, chunks, work)

    def decode(self, items: Sequence[ScheduledRequest], goes_on: bool) -> Tensor:
        """Logits [N, V] of a step of single tokens alone; the next step overwrites them.

        The likeliest token of each row becomes its last one. ``goes_on``: the items are those of the last step in the
        same order, each with the token that was sampled there.
        """
        if goes_on and self.tables.keep_up(self.cache.tables):
            self._advance += 1
            # The tokens are on the device, whether the host knows them by now or not.
            self._tokens[: len(items)] = array("q", [-1]) * len(items)
        else:
            self._begin(items)
        item_blocks, bounds = self.planner.split(len(items), self._batch)
        self._pinned.send(self.tables.step_input(self._tokens, self._advance, item_blocks))
        shape = DecodeShape(self._batch, bounds)
        if self._graphs is None:
            self._decode(shape)
        else:
            self._graphs.run(shape, lambda: self._decode(shape))
        assert self._logits is not None
        return self._logits[: len(items)]

    def capture(self, shape: DecodeShape | MixedShape) -> None:
        """Captures a step, which is run with padding alone. Needs graphs."""
        assert self._graphs is not None and self.mixed is not None
        if isinstance(shape, MixedShape):
            self.mixed.capture(shape)
            return
        padding = Tokens([], [], []).padded(shape.batch, self.tables.spare_row)
        self._pinned.send(self.tables.step_input(padding.packed()))
        self._graphs.capture(shape, lambda: self._decode(shape), shape.kernels)

    def likeliest(self) -> PendingTokens:
        """The tokens of the last step of single tokens, one a row; rows of padding come last."""
        return PendingTokens(self._likeliest, self._copies.begin(2, self._batch))

    def keep_tokens(self, sampling: Sequence[int], token_ids: Tensor) -> None:
        """Stores ``token_ids`` [N], on the device, as the last tokens of the items ``sampling`` of the last step."""
        rows = to_device(torch.tensor([self._step_rows[i] for i in sampling]), self.device)
        self.tables.last_tokens.index_copy_(0, rows, token_ids)

    def _forward(self, decodes: Tokens, chunks: Tokens, work: PrefillWork | None) -> Tensor:
        """``forward`` operator by operator."""
        number, num_decodes = len(decodes.ids) + len(chunks.ids), len(decodes.ids)
        item_blocks, bounds = self.planner.split(num_decodes, num_decodes) if num_decodes else (1, None)
        words = self.tables.step_input(decodes.packed(chunks), item_blocks=item_blocks)
        step_input = to_device(torch.frombuffer(words, dtype=torch.int64), self.device)
        on_device = None if work is None else work.to(self.device)
        placed, step = self.planner.begin(step_input, number, num_decodes, bounds, on_device)
        return self.model(placed.input_ids, placed.positions, step)

    def _begin(self, items: Sequence[ScheduledRequest]) -> None:
        """Makes the token words of a step that does not continue the last one."""
        self._rows(items)
        self._batch, self._advance = padded_batch(len(items)), 0
        self._likeliest = self._sampled[: 2 * self._batch].view(2, self._batch)
        positions = [item.start for item in items]
        known = [(item.request.token_ids, item.start) for item in items]
        ids = [tokens[p] if p < len(tokens) else -1 for tokens, p in known]
        self._tokens = Tokens(ids, positions, self._step_rows).padded(self._batch, self.tables.spare_row).packed()

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

    def _rows(self, items: Sequence[ScheduledRequest]) -> list[int]:
        self._step_rows = self.tables.follow(self.cache.tables, [item.request.request_id for item in items])
        return self._step_rows


def padded_batch(num_rows: int) -> int:
    """Rows of the graph for ``num_rows``: 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, then eight sizes an octave.

    Up to 128 rows products take as long as their weights take to be read. Beyond, fewer sizes would compute up to a
    quarter more rows for nothing.
    """
    octave = 1 << (num_rows - 1).bit_length()
    step = octave if octave <= 32 else octave // 4 if octave <= 128 else octave // 16
    return -(-num_rows // step) * step


def _token_ids(item: ScheduledRequest) -> list[int]:
    """A request's token ids in a step; -1 stands for its last token on the device, which the host does not know yet."""
    ids = item.request.token_ids[item.start : item.end]
    return ids + [-1] * (item.num_tokens - len(ids))
