"""Decode attention in vectorised torch: one call a kind of block (sink, full, open, sealed on each rung), one merge.

Dense blocks are read where they lie: a few strided views of the arena serve as K and V where the blocks of a step lie
close together, which the arena's fullest-first rule makes the usual case; scattered blocks are gathered first. The
dense blocks of a short request that is alone are joined, for one call. Sealed blocks are attended on their bare codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ..attention_parts import merge_parts, partial_attention
from ..block_attention import block_attention
from ..request_pages import LayerPages, RequestPages

MAX_HOLES = 0.4  # most slots read in vain for each needed one; a gather instead is two more passes
CALL_SLOTS = 4  # slots read in the time that one more call takes
FEW_BLOCKS = 8  # up to so many full and open blocks share one call, which costs as much as a block or two
JOINED_BLOCKS = 2  # up to so many blocks of a lone request are copied, in less time than a call and a merge take
GATHER_BLOCKS = 512  # scattered blocks copied at a time, so that scratch stays bounded

Member = tuple[int, int, int | None]  # a dense slot, its request and, if it may be partly written, its valid tokens
Lengths = Sequence[int] | Mapping[int, int]  # tokens written to a request's open block, by request
Part = tuple[Tensor, Tensor]  # outputs [n, H, G, D] and log-sum-exps [n, H, G]


@dataclass(frozen=True)
class DenseGroup:
    """Dense slots attended in one call, cut to their first ``num_tokens`` tokens.

    ``slots`` is a slice of slot numbers when they are read in place, else an index tensor. ``queries`` names each
    slot's request, ``None`` where every request has one slot, in order, or the only request has them all; ``mask``
    hides the unwritten tokens of open blocks; ``num_outputs`` counts the slots. ``opened`` has the place and the
    request of each output that belongs to a block (or sink) that may not be full, ``all_open`` says whether the
    group has no other slots.
    """

    slots: slice | Tensor
    queries: Tensor | None
    num_tokens: int
    mask: Tensor | None
    num_outputs: int
    is_sink: bool
    opened: tuple[tuple[int, int], ...]
    all_open: bool

    def with_lengths(self, lengths: Lengths, device: torch.device) -> DenseGroup:
        """The same slots with new ``lengths``."""
        if not self.opened:
            return self
        valid = {place: lengths[request] for place, request in self.opened}
        num_tokens = max(valid.values()) if self.all_open else self.num_tokens
        return replace(self, num_tokens=num_tokens, mask=_mask(valid, num_tokens, self.num_outputs, device))

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
class JoinedGroup:
    """Dense slots of the only request, copied side by side and attended in one call.

    ``sink`` and ``opened`` are a slot and its valid tokens, ``full`` the slots of full blocks.
    """

    sink: tuple[int, int] | None
    full: tuple[int, ...]
    opened: tuple[int, int] | None

    def with_lengths(self, lengths: Lengths, device: torch.device) -> JoinedGroup:
        """The same slots with a new length of the open block."""
        return self if self.opened is None else replace(self, opened=(self.opened[0], lengths[0]))

    def attend(self, q: Tensor, pages: LayerPages, scale: float) -> list[Part]:
        """The one part of the request; q [1, H, G, D]."""
        pieces = [pages.blocks[slot : slot + 1] for slot in self.full]
        for kv, place in ((pages.sinks, self.sink), (pages.blocks, self.opened)):
            if place is not None and kv is not None:
                slot, valid = place
                pieces.append(kv[slot : slot + 1, :, :, :valid])
        k, v = (torch.cat(pieces, 3) if len(pieces) > 1 else pieces[0]).unbind(1)
        return [partial_attention(q.to(k.dtype), k, v, scale=scale)]


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

    ``order`` [P, B] gathers the groups' outputs, one group after the other, into each request's ``num_parts`` parts; a
    request with fewer repeats its first one, and ``missing`` [P, B] marks the repeats. ``None``: in order already.
    """

    groups: tuple[DenseGroup | JoinedGroup | SealedGroup, ...]
    num_parts: int
    order: Tensor | None
    missing: Tensor | None

    @classmethod
    def build(cls, requests: list[RequestPages], block_tokens: int, device: torch.device) -> DecodePlan:
        builder = _Builder(len(requests), block_tokens, device)
        for rung in sorted({rung for r in requests for rung in r.sealed}):
            builder.add_sealed(
                rung, [(a, b) for b, r in enumerate(requests) for a in r.sealed.get(rung, ()) if r.bank is None]
            )
            for b, request in enumerate(requests):  # a group a request: its patterns are multiplied once
                if request.bank is not None:
                    builder.add_sealed(rung, [(a, b) for a in request.sealed.get(rung, ())], request.bank)
        if len(requests) == 1:
            builder.add_lone(requests[0])
        else:
            builder.add_all(requests)
        return cls(tuple(builder.groups), *builder.order())

    def with_lengths(self, lengths: Lengths, device: torch.device) -> DecodePlan:
        """The plan of a later step in which nothing has changed but the tokens written to each open block."""
        return replace(self, groups=tuple(group.with_lengths(lengths, device) for group in self.groups))


class _Builder:
    """Collects groups and the places of each request's parts in their outputs."""

    def __init__(self, num_requests: int, block_tokens: int, device: torch.device):
        self.block_tokens, self.device = block_tokens, device
        self.groups: list[DenseGroup | JoinedGroup | SealedGroup] = []
        self._num_outputs = 0
        self._parts: list[list[int]] = [[] for _ in range(num_requests)]

    def add_lone(self, request: RequestPages) -> None:
        """Adds the dense slots of the only request."""
        joined = tuple(request.full) if len(request.full) + bool(request.open) <= JOINED_BLOCKS else ()
        if not joined:
            self._add_dense([(slot, 0, None) for slot in request.full], is_sink=False)
        if request.sink or joined or request.open:
            self.groups.append(JoinedGroup(request.sink, joined, request.open))
            self._parts[0].append(self._num_outputs)
            self._num_outputs += 1

    def add_all(self, requests: list[RequestPages]) -> None:
        """Adds the dense slots of several requests."""
        sinks: list[Member] = [(r.sink[0], b, r.sink[1]) for b, r in enumerate(requests) if r.sink]
        full: list[Member] = [(slot, b, None) for b, r in enumerate(requests) for slot in r.full]
        opened: list[Member] = [(r.open[0], b, r.open[1]) for b, r in enumerate(requests) if r.open]
        self._add_dense(sinks, is_sink=True)
        if len(full) + len(opened) <= FEW_BLOCKS:
            self._add_dense(full + opened, is_sink=False)
        else:
            self._add_dense(full, is_sink=False)
            self._add_dense(opened, is_sink=False)

    def _add_dense(self, members: Sequence[Member], *, is_sink: bool) -> None:
        if not members:
            return
        slots = [slot for slot, _, _ in members]
        runs = _runs(slots)
        if runs is None:
            self._add_group(torch.tensor(slots, device=self.device), len(slots), enumerate(members), is_sink)
            return
        for run in runs:
            placed = [(run.index(member[0]), member) for member in members if member[0] in run]
            self._add_group(slice(run.start, run.stop, run.step), len(run), placed, is_sink)

    def _add_group(
        self, where: slice | Tensor, num_outputs: int, placed: Iterable[tuple[int, Member]], is_sink: bool
    ) -> None:
        owner, opened, valid = [0] * num_outputs, [], {}
        num_placed = 0
        for place, (_, request, num_tokens) in placed:
            owner[place] = request
            self._parts[request].append(self._num_outputs + place)
            num_placed += 1
            if num_tokens is not None:
                opened.append((place, request))
                valid[request] = num_tokens
        all_open = len(opened) == num_placed
        group = DenseGroup(
            where, self._queries(owner), self.block_tokens, None, num_outputs, is_sink, tuple(opened), all_open
        ).with_lengths(valid, self.device)
        self.groups.append(replace(group, opened=()) if is_sink else group)  # a plan lives on with the same sinks
        self._num_outputs += num_outputs

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
        rows = list(zip(*(mine + mine[:1] * (most - len(mine)) for mine in self._parts), strict=True))
        if [part for row in rows for part in row] == list(range(self._num_outputs)):
            return most, None, None
        missing = None
        if any(len(mine) < most for mine in self._parts):
            missing = torch.tensor([[i >= len(mine) for mine in self._parts] for i in range(most)], device=self.device)
        return most, torch.tensor(rows, device=self.device), missing

    def _queries(self, owner: list[int]) -> Tensor | None:
        if len(self._parts) == 1 or owner == list(range(len(self._parts))):
            return None
        return torch.tensor(owner, device=self.device)


def _runs(slots: list[int]) -> list[range] | None:
    """Runs of slots to read in place, some of which are not asked for; ``None`` where a gather is cheaper."""
    ordered = sorted(slots)
    even = _even_run(ordered)
    if even is not None:
        return [even]
    if len(set(slots)) < len(slots):
        return None  # a block that several requests share comes out once for each
    cuts = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b - a > CALL_SLOTS]
    runs = [range(ordered[i], ordered[j - 1] + 1) for i, j in pairwise([0, *cuts, len(ordered)])]
    in_vain = sum(map(len, runs)) - len(slots) + CALL_SLOTS * len(cuts)
    return runs if in_vain <= MAX_HOLES * len(slots) else None


def _even_run(numbers: list[int]) -> range | None:
    """Growing numbers in even steps as a range; ``None`` for others."""
    steps = {b - a for a, b in pairwise(numbers)} or {1}
    step = steps.pop()
    return range(numbers[0], numbers[-1] + 1, step) if not steps and step > 0 else None


def _mask(valid: Mapping[int, int], num_tokens: int, num_outputs: int, device: torch.device) -> Tensor | None:
    """0 or -inf for each token [n, 1, 1, num_tokens], by the ``valid`` ones of some outputs; ``None`` if all are."""
    if min(valid.values()) == num_tokens:
        return None
    lengths = [valid.get(place, num_tokens) for place in range(num_outputs)]
    rows = _masks(1 << (num_tokens - 1).bit_length(), device)[torch.tensor(lengths, device=device)]
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
    if plan.num_parts > 1:
        out, lse = _arrange(out, plan), _arrange(lse, plan)
        if plan.missing is not None:
            lse = lse.masked_fill(plan.missing[..., None, None], float("-inf"))
        out = merge_parts(out, lse)
    elif plan.order is not None:
        out = out[plan.order[0]]
    return out.reshape(q.shape).to(q.dtype)


def _select(q: Tensor, queries: Tensor | None, num_outputs: int) -> Tensor:
    return q.expand(num_outputs, -1, -1, -1) if queries is None else q[queries]


def _arrange(x: Tensor, plan: DecodePlan) -> Tensor:
    """Outputs [n, ...] as [num_parts, B, ...]."""
    return x.unflatten(0, (plan.num_parts, -1)) if plan.order is None else x[plan.order]
