"""Decode attention in vectorised torch: a few calls on the dense pages, one a rung on the sealed ones, one merge.

Dense blocks that lie evenly spaced are read in place: a strided view of the arena serves as K and V. All others are
copied to a scratch of a core's cache first, which costs little, since the reading is all that takes time. There a sink
and an open block lie side by side, for one call. Sealed blocks are attended on their bare codes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor

from ..attention_parts import join_null_logits, merge_parts, merge_steadily, partial_attention
from ..block_attention import block_attention
from ..request_pages import LayerPages, RequestPages
from .rows import RequestRow, SealedBlock, SlotColumn

SCRATCH_NBYTES = 2**20  # of K and V copied for one call: more leave the cache, fewer make more calls
FEW_BLOCKS = 8  # up to so many full and open blocks share one call, which costs as much as a block or two
LEAST_RUN = 4  # blocks in an even run that have a call of their own, so that they need no copy
JOINED_BLOCKS = 2  # up to so many blocks of a lone request are copied, in less time than a call and a merge take

Lengths = Sequence[int] | Mapping[int, int]  # tokens written to a request's open block, by request
Part = tuple[Tensor, Tensor]  # outputs [n, H, G, D] and log-sum-exps [n, H, G]


@dataclass(frozen=True)
class DenseGroup:
    """Dense slots attended together, ``num_rows`` rows of ``columns``.

    A lone column whose ``slots`` are a slice is read in place; those of a lone row are joined. ``queries`` names each
    row's request, ``None`` where every request has one row, in order, or the only request has them all; ``mask`` hides
    the unwritten tokens of the last column, and those of the first before a window; ``opened`` has place and request of
    the rows whose last slot may be partly written. ``unit``: a multiple of it is attended of them, with a mask, however
    few are valid.
    """

    columns: tuple[SlotColumn, ...]
    num_rows: int
    queries: Tensor | slice | None
    opened: tuple[tuple[int, int], ...]
    all_open: bool
    unit: int | None
    mask: Tensor | None = None

    def with_lengths(self, lengths: Lengths) -> DenseGroup:
        """The same slots with new ``lengths``."""
        if not self.opened:
            return self
        valid = {place: lengths[request] for place, request in self.opened}
        *before, last = self.columns
        if self.all_open and not last.is_sink:
            unit = self.unit or 1
            last = last._replace(num_tokens=-(-max(valid.values()) // unit) * unit)
        num_before = sum(column.num_tokens for column in before)
        mask = _mask(valid, num_before, last.num_tokens, self.num_rows, always=self.unit is not None)
        return replace(self, columns=(*before, last), mask=mask)

    def hiding(self, num_hidden: Sequence[int]) -> DenseGroup:
        """The same slots without the first tokens of each row."""
        if not any(num_hidden):
            return self
        num_tokens = sum(column.num_tokens for column in self.columns)
        mask = torch.zeros(self.num_rows, num_tokens)
        mask.masked_fill_(torch.arange(num_tokens) < torch.tensor(num_hidden)[:, None], float("-inf"))
        mask = mask[:, None, None]
        return replace(self, mask=mask if self.mask is None else self.mask + mask)

    def attend(self, q: Tensor, pages: LayerPages, scale: float, softcap: float | None) -> list[Part]:
        """Parts of the group's rows; q [B, H, G, D]."""
        q = q.to(pages.blocks.dtype)
        q = q.expand(self.num_rows, -1, -1, -1) if self.queries is None else q[self.queries]
        sources = [column.pages(pages) for column in self.columns]
        if isinstance(self.columns[0].slots, slice):
            found = [source[column.slots] for source, column in zip(sources, self.columns, strict=True)]
            k, v = (found[0] if len(found) == 1 else torch.cat(found, 3)).unbind(1)
            return [partial_attention(q, k, v, scale=scale, mask=self.mask, softcap=softcap)]
        step = max(1, SCRATCH_NBYTES // sum(source[:1].nbytes for source in sources))
        parts = []
        for start in range(0, self.num_rows, step):
            rows = slice(start, start + step)
            k, v = self._copy(sources, rows).unbind(1)
            mask = None if self.mask is None else self.mask[rows]
            parts.append(partial_attention(q[rows], k, v, scale=scale, mask=mask, softcap=softcap))
        return parts

    def _copy(self, sources: list[Tensor], rows: slice) -> Tensor:
        """The tokens of some rows, [n, 2, H, tokens of all columns, D]."""
        where = [column.slots[rows] for column in self.columns if isinstance(column.slots, Tensor)]
        if len(sources) == 1:
            return sources[0].index_select(0, where[0])
        _, sides, heads, _, head_dim = sources[0].shape
        num_tokens = [source.shape[3] for source in sources]
        kv = sources[0].new_empty(len(where[0]), sides, heads, sum(num_tokens), head_dim)
        for source, slots, out in zip(sources, where, kv.split(num_tokens, 3), strict=True):
            torch.index_select(source, 0, slots, out=out)
        return kv


@dataclass(frozen=True)
class SealedGroup:
    """Sealed blocks on one rung, all full; ``where`` has their addresses, evenly spaced ones as a range.

    ``bank`` [1] is the address of their request's bank, and ``queries`` [1] names it; ``None`` without patterns.
    ``hidden`` [n]: the first tokens of each block that lie before a window; ``None`` if none do.
    """

    rung: int
    where: Tensor | range
    queries: Tensor | slice | None
    bank: Tensor | None = None
    hidden: Tensor | None = None

    def with_lengths(self, lengths: Lengths) -> SealedGroup:
        """Itself: sealed blocks are full."""
        return self

    def attend(self, q: Tensor, pages: LayerPages, scale: float, softcap: float | None) -> list[Part]:
        """Parts of the blocks; q [B, H, G, D]."""
        if self.queries is not None:
            q = q[self.queries]
        page = pages.layouts[self.rung].pages[pages.layer]
        place = q, pages.memory, self.where, page, scale, self.bank
        return [block_attention(*place, hidden=self.hidden, softcap=softcap)]


@dataclass(frozen=True)
class DecodePlan:
    """Plan of one step's decode attention, the same for all layers of one window.

    ``order`` [P, B] gathers the groups' outputs, one group after the other, into each request's ``num_parts`` parts; a
    request with fewer repeats its first one, and ``missing`` [P, B] marks the repeats. ``None``: in order already.
    ``is_steady``: a request's output has the same bits whatever requests are beside it, and wherever its blocks lie.
    """

    groups: tuple[DenseGroup | SealedGroup, ...]
    num_parts: int
    order: Tensor | None
    missing: Tensor | None
    is_steady: bool

    @classmethod
    def build(
        cls,
        requests: list[RequestPages],
        block_tokens: int,
        window: int | None = None,
        *,
        sink_tokens: int = 0,
        unit: int | None = None,
    ) -> DecodePlan:
        """A plan for the last token of each request, which sees ``window`` tokens of the request's pages.

        With a ``unit`` of tokens, whose multiples agree with a block, it is steady. Such a plan needs the number of
        ``sink_tokens`` of a slot of theirs.
        """
        builder = _Builder(len(requests), block_tokens, window, sink_tokens, unit)
        for rung in sorted({rung for r in requests for rung in r.sealed}):
            blocks = [builder.sealed_blocks(b, r, rung) for b, r in enumerate(requests)]
            builder.add_sealed(
                rung, [block for r, mine in zip(requests, blocks, strict=True) if r.bank is None for block in mine]
            )
            for request, mine in zip(requests, blocks, strict=True):  # patterns are multiplied once a request
                if request.bank is not None:
                    builder.add_sealed(rung, mine, request.bank)
        builder.add_dense(requests)
        return cls(tuple(builder.groups), *builder.order(), unit is not None)

    def with_lengths(self, lengths: Lengths) -> DecodePlan:
        """The plan of a later step in which nothing has changed but the tokens written to each open block.

        A plan with a window is not for later steps.
        """
        return replace(self, groups=tuple(group.with_lengths(lengths) for group in self.groups))


class _Builder:
    """Collects groups and the places of each request's parts in their outputs."""

    def __init__(self, num_requests: int, block_tokens: int, window: int | None, sink_tokens: int, unit: int | None):
        self.block_tokens, self.window = block_tokens, window
        self.sink_tokens, self.unit, self.is_steady = sink_tokens, unit, unit is not None
        self.groups: list[DenseGroup | SealedGroup] = []
        self._num_outputs = 0
        self._parts: list[list[tuple[int, int]]] = [[] for _ in range(num_requests)]  # places and outputs

    def add_dense(self, requests: list[RequestPages]) -> None:
        """Adds sinks, full and open blocks: a sink beside the open block, in a short lone request beside all blocks."""
        num_blocks = sum(len(r.full) + bool(r.open) for r in requests)
        is_short = len(requests) == 1 and num_blocks <= JOINED_BLOCKS and not self.is_steady
        is_few = num_blocks <= FEW_BLOCKS and not self.is_steady
        alike = defaultdict[tuple[bool, int, bool, bool], list[RequestRow]](list)
        for b, r in enumerate(requests):
            slots, num_sink, num_valid, first = [], 0, None, 0
            if r.open:
                first = r.length - r.open[1]
            if is_short and r.full:
                first = self._positions(r, 0)[0]
            if r.sink:
                first = 0
                slot, num_sink = r.sink
                slots.append(slot)
                num_valid = num_sink
            if is_short and r.full:
                slots += r.full
                num_valid = None
            if r.open:
                slot, num_valid = r.open
                slots.append(slot)
            if slots:
                row = RequestRow(b, slots, num_sink, num_valid, self._num_hidden(r, first), self._place(first))
                alike[bool(r.sink), len(slots), bool(r.open), row.num_hidden > 0].append(row)
            for slot, first in () if is_short else zip(r.full, self._positions(r, 0), strict=True):
                row = RequestRow(b, [slot], 0, None, self._num_hidden(r, first), self._place(first))
                alike[False, 1, is_few, row.num_hidden > 0].append(row)
        for rows in alike.values():
            self._add_alike(rows)

    def _add_alike(self, rows: list[RequestRow]) -> None:
        """Adds rows with equally many slots of the same kinds, lone slots in the long runs that they lie in."""
        if len(rows[0].slots) > 1:
            self._add_rows(rows)
            return
        scattered = list[RequestRow]()
        for run in _even_runs(sorted(rows, key=lambda row: row.slots)):
            if len(run) >= LEAST_RUN:
                self._add_rows(run)
            else:
                scattered += run
        if scattered:
            is_run = _even_run([row.slots[0] for row in scattered]) is not None
            self._add_rows(scattered if is_run else sorted(scattered))  # copies in the order of their requests

    def _add_rows(self, rows: list[RequestRow]) -> None:
        """Adds a group of rows with equally many slots of the same kinds; lone slots in an even run come in order."""
        num_sink = max(row.num_sink for row in rows)
        if num_sink and self.is_steady:
            num_sink = self.sink_tokens
        columns = list[SlotColumn]()
        for slots in zip(*(row.slots for row in rows), strict=True):
            is_sink = num_sink > 0 and not columns
            run = _even_run(slots) if len(rows) == 1 or len(rows[0].slots) == 1 else None
            where = torch.tensor(slots) if run is None else slice(run.start, run.stop, run.step)
            columns.append(SlotColumn(is_sink, where, num_sink if is_sink else self.block_tokens))
        opened = tuple((place, row.request) for place, row in enumerate(rows) if row.num_valid is not None)
        queries = self._queries([row.request for row in rows])
        group = DenseGroup(tuple(columns), len(rows), queries, opened, len(opened) == len(rows), self.unit)
        valid = {row.request: row.num_valid for row in rows if row.num_valid is not None}
        group = group.with_lengths(valid).hiding([row.num_hidden for row in rows])
        # A plan with new lengths has the same sinks.
        self.groups.append(replace(group, opened=()) if columns[-1].is_sink else group)
        for row in rows:
            self._parts[row.request].append((row.place, self._num_outputs))
            self._num_outputs += 1

    def sealed_blocks(self, index: int, request: RequestPages, rung: int) -> list[SealedBlock]:
        """Blocks of a request on a rung."""
        found = zip(request.sealed.get(rung, ()), self._positions(request, rung), strict=True)
        return [
            SealedBlock(address, index, self._num_hidden(request, first), self._place(first))
            for address, first in found
        ]

    def add_sealed(self, rung: int, blocks: list[SealedBlock], bank: int | None = None) -> None:
        """Adds sealed blocks; with a ``bank`` they are all of its request."""
        for is_cut in {block.num_hidden > 0 for block in blocks}:  # partly hidden ones apart
            self._add_sealed(rung, sorted(block for block in blocks if (block.num_hidden > 0) == is_cut), bank)

    def _add_sealed(self, rung: int, blocks: list[SealedBlock], bank: int | None) -> None:
        for i, block in enumerate(blocks):
            self._parts[block.request].append((block.place, self._num_outputs + i))
        addresses = [block.address for block in blocks]
        where = _even_run(addresses)
        owner = [block.request for block in blocks]
        queries = self._queries(owner if bank is None else owner[:1])
        place = torch.tensor(addresses) if where is None else where
        mine = None if bank is None else torch.tensor([bank])
        hidden = torch.tensor([block.num_hidden for block in blocks]) if blocks[0].num_hidden else None
        self.groups.append(SealedGroup(rung, place, queries, mine, hidden))
        self._num_outputs += len(blocks)

    def order(self) -> tuple[int, Tensor | None, Tensor | None]:
        """``DecodePlan.num_parts``, ``order`` and ``missing``."""
        most = max(len(mine) for mine in self._parts)
        in_order = [[output for _, output in sorted(mine, key=itemgetter(0))] for mine in self._parts]
        rows = list(zip(*(mine + mine[:1] * (most - len(mine)) for mine in in_order), strict=True))
        if [part for row in rows for part in row] == list(range(self._num_outputs)):
            return most, None, None
        missing = None
        if any(len(mine) < most for mine in self._parts):
            missing = torch.tensor([[i >= len(mine) for mine in self._parts] for i in range(most)])
        return most, torch.tensor(rows), missing

    def _place(self, first: int) -> int:
        """The place of a part that begins with token ``first``: by position, or as it comes."""
        return first if self.is_steady else 0

    def _num_hidden(self, request: RequestPages, first: int) -> int:
        """Tokens before the window of the block whose first token is at position ``first``."""
        return 0 if self.window is None else max(0, request.length - self.window - first)

    def _positions(self, request: RequestPages, rung: int) -> list[int]:
        """The first token of each full block of a rung; no matter which without a window, unless parts are ordered."""
        if self.window is not None or self.is_steady:
            return request.positions.get(rung, [])
        return [0] * len(request.sealed.get(rung, ()) if rung else request.full)

    def _queries(self, owner: list[int]) -> Tensor | slice | None:
        if len(self._parts) == 1 or owner == list(range(len(self._parts))):
            return None
        is_run = owner == list(range(owner[0], owner[0] + len(owner)))
        return slice(owner[0], owner[0] + len(owner)) if is_run else torch.tensor(owner)


def _even_runs(rows: list[RequestRow]) -> list[list[RequestRow]]:
    """Rows of lone slots, in order, cut where the step from slot to slot changes."""
    runs, step = [rows[:1]], 0
    for before, row in pairwise(rows):
        last_step, step = step, row.slots[0] - before.slots[0]
        if len(runs[-1]) > 1 and step != last_step:
            runs.append([runs[-1].pop()] if len(runs[-1]) == 2 else [])
        runs[-1].append(row)
    return runs


def _even_run(numbers: Sequence[int]) -> range | None:
    """Growing numbers in even steps as a range; ``None`` for others."""
    steps = {b - a for a, b in pairwise(numbers)} or {1}
    step = steps.pop()
    return range(numbers[0], numbers[-1] + 1, step) if not steps and step > 0 else None


def _mask(valid: Mapping[int, int], num_before: int, num_last: int, num_rows: int, *, always: bool) -> Tensor | None:
    """0 or -inf for each token [n, 1, 1, num_before + num_last], by the ``valid`` ones of the last slot of some rows.

    ``None`` if all are valid, unless there is ``always`` to be one.
    """
    if min(valid.values()) == num_last and not always:
        return None
    lengths = torch.tensor([num_before + valid.get(place, num_last) for place in range(num_rows)])
    num_tokens = num_before + num_last
    return _masks(1 << (num_tokens - 1).bit_length())[lengths][:, None, None, :num_tokens]


@cache
def _masks(num_tokens: int) -> Tensor:
    """Row n hides tokens n and later: [num_tokens + 1, num_tokens]."""
    return torch.full((num_tokens + 1, num_tokens), float("-inf")).triu()


def paged_decode(
    q: Tensor,
    pages: LayerPages,
    plan: DecodePlan,
    scale: float,
    *,
    softcap: float | None = None,
    null_logits: Tensor | None = None,
) -> Tensor:
    """Attention of one query per request over its blocks, as far back as the plan's window.

    Shapes:  q [B, HQ, D];  null_logits [HQ];  returns [B, HQ, D] in q's dtype
    Equal to ``paged_decode_reference`` up to rounding; dense blocks compute in their own dtype with float32 sums.
    """
    grouped = q.view(q.shape[0], pages.blocks.shape[2], -1, q.shape[-1])
    heads = grouped.shape[2]
    if plan.is_steady and heads == 1:  # products of one row are rounded as its bytes happen to be aligned
        grouped = grouped.repeat(1, 1, 2, 1)
    parts = [part for group in plan.groups for part in group.attend(grouped, pages, scale, softcap)]
    out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if grouped.shape[2] > heads:
        out, lse = out[:, :, :heads], lse[:, :, :heads]
    if plan.num_parts > 1:
        out, lse = _arrange(out, plan), _arrange(lse, plan)
        if plan.missing is not None:
            lse = lse.masked_fill(plan.missing[..., None, None], float("-inf"))
        if plan.is_steady:
            out, total = merge_steadily(out, lse)
            lse = lse if null_logits is None else total.log() + lse.amax(0)
        else:
            out, lse = merge_parts(out, lse), lse if null_logits is None else lse.logsumexp(0)
    elif plan.order is not None:
        out, lse = out[plan.order[0]], lse[plan.order[0]]
    if null_logits is not None:
        out = join_null_logits(out, lse, null_logits.view(lse.shape[1:]))
    return out.reshape(q.shape).to(q.dtype)


def _arrange(x: Tensor, plan: DecodePlan) -> Tensor:
    """Outputs [n, ...] as [num_parts, B, ...]."""
    return x.unflatten(0, (plan.num_parts, -1)) if plan.order is None else x[plan.order]
