"""Decode attention in vectorised torch: one call a kind of block (sink, full, open, sealed on each rung), one merge.

Dense blocks are read where they lie: a strided view of the arena serves as K and V whenever the blocks of a step lie
close together, which the arena's fullest-first rule makes the usual case; scattered blocks are gathered first. Sealed
blocks are attended on their bare codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ..attention_parts import merge_parts, partial_attention
from ..block_attention import block_attention
from ..request_pages import LayerPages, RequestPages

MIN_DENSITY = 0.7  # least share of needed slots for which a range is read in place: a gather is two more passes
FEW_BLOCKS = 8  # up to so many full and open blocks share one call, which costs as much as a block or two
GATHER_BLOCKS = 512  # scattered blocks copied at a time, so that scratch stays bounded

Member = tuple[int, int, int | None]  # a dense slot, its request and, if it may be partly written, its valid tokens
Part = tuple[Tensor, Tensor]  # outputs [n, H, G, D] and log-sum-exps [n, H, G]


@dataclass(frozen=True)
class DenseGroup:
    """Dense slots attended in one call, cut to their first ``num_tokens`` tokens.

    ``slots`` is a slice of slot numbers when they are read in place, else an index tensor. ``queries`` names each
    slot's request, ``None`` where every request has one slot, in order, or the only request has them all; ``mask``
    hides the unwritten tokens of open blocks; ``num_outputs`` counts the slots. ``open_places`` says which outputs
    belong to blocks (or sinks) that may not be full, ``all_open`` whether the group has no other slots.
    """

    slots: slice | Tensor
    queries: Tensor | None
    num_tokens: int
    mask: Tensor | None
    num_outputs: int
    is_sink: bool
    open_places: tuple[int, ...]
    all_open: bool

    def with_lengths(self, lengths: Sequence[int], device: torch.device) -> DenseGroup:
        """The same slots with new ``lengths``, the tokens written to each open block."""
        num_tokens = max(lengths) if self.all_open else self.num_tokens
        mask = _mask(self.open_places, lengths, num_tokens, self.num_outputs, device)
        return replace(self, num_tokens=num_tokens, mask=mask)

    def attend(self, q: Tensor, pages: LayerPages, scale: float) -> list[Part]:
        """Parts of the group's slots, in pieces of bounded scratch; q [B, H, G, D]."""
        kv = pages.sinks if self.is_sink else pages.blocks
        assert kv is not None
        queries = _select(q.to(kv.dtype), self.queries, self.num_outputs)
        if isinstance(self.slots, slice):
            k, v = kv[self.slots, :, :, : self.num_tokens].unbind(1)
            return [partial_attention(queries, k, v, scale=scale, mask=self.mask)]
        parts, kv = [], kv[:, :, :, : self.num_tokens]
        for start in range(0, self.num_outputs, GATHER_BLOCKS):
            piece = slice(start, start + GATHER_BLOCKS)
            k, v = kv.index_select(0, self.slots[piece]).unbind(1)
            mask = None if self.mask is None else self.mask[piece]
            parts.append(partial_attention(queries[piece], k, v, scale=scale, mask=mask))
        return parts


@dataclass(frozen=True)
class SealedGroup:
    """Sealed blocks on one rung, all full; ``where`` has their addresses, evenly spaced ones as a range.

    ``bank`` [1] is the address of their request's bank, and ``queries`` [1] names it; ``None`` without patterns.
    """

    rung: int
    where: Tensor | range
    queries: Tensor | None
    bank: Tensor | None = None

    def attend(self, q: Tensor, pages: LayerPages, scale: float) -> list[Part]:
        if self.queries is not None:
            q = q[self.queries]
        page = pages.layouts[self.rung].pages[pages.layer]
        return [block_attention(q, pages.memory, self.where, page, scale, self.bank)]


@dataclass(frozen=True)
class DecodePlan:
    """Plan of one step's decode attention, the same for all layers.

    ``order`` [B, P] gathers the groups' outputs, one group after the other, into each request's ``num_parts`` parts; a
    request with fewer repeats its first one, and ``missing`` [B, P] marks the repeats. ``None``: in order already.
    """

    groups: tuple[DenseGroup | SealedGroup, ...]
    num_parts: int
    order: Tensor | None
    missing: Tensor | None

    @classmethod
    def build(cls, requests: list[RequestPages], block_tokens: int, device: torch.device) -> DecodePlan:
        builder = _Builder(len(requests), block_tokens, device)
        sinks: list[Member] = [(r.sink[0], b, r.sink[1]) for b, r in enumerate(requests) if r.sink]
        full: list[Member] = [(slot, b, None) for b, r in enumerate(requests) for slot in r.full]
        opened: list[Member] = [(r.open[0], b, r.open[1]) for b, r in enumerate(requests) if r.open]
        builder.add_dense(sinks, is_sink=True)
        for rung in sorted({rung for r in requests for rung in r.sealed}):
            builder.add_sealed(
                rung, [(a, b) for b, r in enumerate(requests) for a in r.sealed.get(rung, ()) if r.bank is None]
            )
            for b, request in enumerate(requests):  # a group a request: its patterns are multiplied once
                if request.bank is not None:
                    builder.add_sealed(rung, [(a, b) for a in request.sealed.get(rung, ())], request.bank)
        if len(full) + len(opened) <= FEW_BLOCKS:
            builder.add_dense(full + opened, is_sink=False)
        else:
            builder.add_dense(full, is_sink=False)
            builder.add_dense(opened, is_sink=False)
        return cls(tuple(builder.groups), *builder.order())

    def with_lengths(self, lengths: Sequence[int], device: torch.device) -> DecodePlan:
        """The plan of a later step in which nothing has changed but the tokens written to each open block."""
        if not lengths:
            return self
        *groups, last = self.groups
        assert not isinstance(last, SealedGroup), "open blocks come last"
        return replace(self, groups=(*groups, last.with_lengths(lengths, device)))


class _Builder:
    """Collects groups and the places of each request's parts in their outputs."""

    def __init__(self, num_requests: int, block_tokens: int, device: torch.device):
        self.block_tokens, self.device = block_tokens, device
        self.groups: list[DenseGroup | SealedGroup] = []
        self._num_outputs = 0
        self._parts: list[list[int]] = [[] for _ in range(num_requests)]

    def add_dense(self, members: Sequence[Member], *, is_sink: bool) -> None:
        if not members:
            return
        where, place = _choose_slots([slot for slot, _, _ in members], self.device)
        owner = [0] * (max(place) + 1)
        for p, (_, request, _) in zip(place, members, strict=True):
            owner[p] = request
            self._parts[request].append(self._num_outputs + p)
        valid = [n for _, _, n in members if n is not None]
        open_places = tuple(p for p, (_, _, n) in zip(place, members, strict=True) if n is not None)
        queries = self._queries(owner)
        all_open = len(valid) == len(members)
        group = DenseGroup(where, queries, self.block_tokens, None, len(owner), is_sink, open_places, all_open)
        self.groups.append(group.with_lengths(valid, self.device) if valid else group)
        self._num_outputs += len(owner)

    def add_sealed(self, rung: int, members: list[tuple[int, int]], bank: int | None = None) -> None:
        """Adds sealed blocks as (address, request); with a ``bank`` they are all of its request."""
        if not members:
            return
        members = sorted(members)
        for i, (_, request) in enumerate(members):
            self._parts[request].append(self._num_outputs + i)
        addresses = [address for address, _ in members]
        where = _even_run(addresses)
        owner = [request for _, request in members]
        queries = self._queries(owner if bank is None else owner[:1])
        place = torch.tensor(addresses, device=self.device) if where is None else where
        mine = None if bank is None else torch.tensor([bank], device=self.device)
        self.groups.append(SealedGroup(rung, place, queries, mine))
        self._num_outputs += len(members)

    def order(self) -> tuple[int, Tensor | None, Tensor | None]:
        """``DecodePlan.num_parts``, ``order`` and ``missing``."""
        most = max(len(mine) for mine in self._parts)
        rows = [mine + mine[:1] * (most - len(mine)) for mine in self._parts]
        if [part for row in rows for part in row] == list(range(self._num_outputs)):
            return most, None, None
        missing = None
        if any(len(mine) < most for mine in self._parts):
            present = [[i >= len(mine) for i in range(most)] for mine in self._parts]
            missing = torch.tensor(present, device=self.device)
        return most, torch.tensor(rows, device=self.device), missing

    def _queries(self, owner: list[int]) -> Tensor | None:
        if len(self._parts) == 1 or owner == list(range(len(self._parts))):
            return None
        return torch.tensor(owner, device=self.device)


def _choose_slots(slots: list[int], device: torch.device) -> tuple[slice | Tensor, list[int]]:
    """The slots to read, in place or by index, and the index of each of ``slots`` among them."""
    ordered = sorted(slots)
    run = _even_run(ordered)
    if run is None and len(set(slots)) == len(slots) >= MIN_DENSITY * (ordered[-1] - ordered[0] + 1):
        run = range(ordered[0], ordered[-1] + 1)
    if run is None:  # also a block that several requests share: it comes out once for each
        return torch.tensor(slots, device=device), list(range(len(slots)))
    return _as_slice(run), [run.index(slot) for slot in slots]


def _even_run(numbers: list[int]) -> range | None:
    """Growing numbers in even steps as a range; ``None`` for others."""
    steps = {b - a for a, b in pairwise(numbers)} or {1}
    step = steps.pop()
    return range(numbers[0], numbers[-1] + 1, step) if not steps and step > 0 else None


def _as_slice(run: range) -> slice:
    return slice(run.start, run.stop, run.step)


def _mask(
    places: Sequence[int], lengths: Sequence[int], num_tokens: int, num_outputs: int, device: torch.device
) -> Tensor | None:
    """0 or -inf for each token [n, 1, 1, num_tokens], by how many are written; ``None`` if all are."""
    if min(lengths) == num_tokens:
        return None
    valid = [num_tokens] * num_outputs
    for place, length in zip(places, lengths, strict=True):
        valid[place] = length
    rows = _masks(1 << (num_tokens - 1).bit_length(), device)[torch.tensor(valid, device=device)]
    return rows[:, None, None, :num_tokens]


@cache
def _masks(num_tokens: int, device: torch.device) -> Tensor:
    """Row n hides tokens n and later: [num_tokens + 1, num_tokens]."""
    return torch.full((num_tokens + 1, num_tokens), float("-inf"), device=device).triu()


def paged_decode(q: Tensor, pages: LayerPages, plan: DecodePlan, scale: float) -> Tensor:
    """Attention of one query per request over its blocks.

    Shapes:  q [B, HQ, D];  returns [B, HQ, D] in q's dtype
    Equal to ``paged_decode_reference`` up to rounding; dense blocks compute in their own dtype with float32 sums.
    """
    grouped = q.view(q.shape[0], pages.blocks.shape[2], -1, q.shape[-1])
    parts = [part for group in plan.groups for part in group.attend(grouped, pages, scale)]
    out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    out = _arrange(out, plan)
    if plan.num_parts > 1:
        lse = _arrange(lse, plan)
        if plan.missing is not None:
            lse = lse.masked_fill(plan.missing[:, :, None, None], float("-inf"))
        out = merge_parts(out, lse)
    return out.reshape(q.shape).to(q.dtype)


def _select(q: Tensor, queries: Tensor | None, num_outputs: int) -> Tensor:
    return q.expand(num_outputs, -1, -1, -1) if queries is None else q[queries]


def _arrange(x: Tensor, plan: DecodePlan) -> Tensor:
    """Outputs [n, ...] as [B, num_parts, ...]."""
    if plan.order is not None:
        return x[plan.order]
    return x.view(-1, plan.num_parts, *x.shape[1:])
