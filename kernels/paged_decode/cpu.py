"""Decode attention in vectorised torch: one flash call over all full blocks, one over all open ones, one merge.

Blocks are read where they lie: a strided view of the arena serves as K and V whenever the blocks of a step lie
close together, which the arena's fullest-first rule makes the usual case; scattered blocks are gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..partial import merge_parts, partial_attention

MIN_DENSITY = (
    0.7  # read a range of slots in place if at least this share of it is wanted; a gather costs two more passes
)
GATHER_BLOCKS = 512  # scattered blocks copied at a time, so that scratch stays bounded


@dataclass(frozen=True)
class BlockGroup:
    """Some blocks attended in one call, cut to their first ``num_tokens`` tokens.

    ``slots`` is a slice of slot numbers when they are read in place, else an index tensor. ``queries`` names each
    slot's request; ``mask`` hides the unwritten tokens of open blocks; ``num_slots`` counts the outputs.
    """

    slots: slice | Tensor
    queries: Tensor
    num_tokens: int
    mask: Tensor | None
    num_slots: int


@dataclass(frozen=True)
class DecodePlan:
    """Everything about one step's decode attention that is the same for all layers.

    ``order`` [B, P] gathers the groups' outputs, one after the other, into each request's parts; a request with
    fewer than P parts repeats its first one, and ``missing`` [B, P] marks the repeats.
    """

    groups: tuple[BlockGroup, ...]
    order: Tensor | None
    missing: Tensor | None

    @classmethod
    def build(
        cls, block_tables: list[list[int]], lengths: list[int], num_tokens: int, device: torch.device
    ) -> DecodePlan:
        """Plan for requests whose blocks of ``num_tokens`` tokens lie in the given slots; ``lengths`` in tokens."""
        full: list[tuple[int, int]] = []  # (slot, request)
        open_: list[tuple[int, int]] = []
        parts: list[list[tuple[int, int]]] = []  # per request: (group, index into that group's list)
        for b, (table, length) in enumerate(zip(block_tables, lengths, strict=True)):
            num_full, rest = divmod(length, num_tokens)
            mine = [(0, len(full) + i) for i in range(num_full)]
            full.extend((slot, b) for slot in table[:num_full])
            if rest:
                mine.append((1, len(open_)))
                open_.append((table[num_full], b))
            parts.append(mine)
        groups: list[BlockGroup] = []
        places: list[list[int]] = []
        rests = [lengths[b] % num_tokens for _, b in open_]
        for members, valid in ((full, None), (open_, rests)):
            if members:
                group, place = _make_group(members, valid, num_tokens, device)
                offset = sum(g.num_slots for g in groups)
                groups.append(group)
                places.append([offset + p for p in place])
            else:
                places.append([])
        order, missing = _make_order([[places[g][i] for g, i in mine] for mine in parts], device)
        if order is not None and len(groups) == 1 and order.tolist() == [[i] for i in range(groups[0].num_slots)]:
            order = None
        return cls(tuple(groups), order, missing)


def _make_group(
    members: list[tuple[int, int]], valid: list[int] | None, num_tokens: int, device: torch.device
) -> tuple[BlockGroup, list[int]]:
    """The group of ``members`` (slot, request) and, for each member, the index of its output in the group."""
    slots = [slot for slot, _ in members]
    low, high = min(slots), max(slots)
    steps = {b - a for a, b in pairwise(slots)}
    step = steps.pop() if len(steps) == 1 else 1
    if step < 1 or (step == 1 and len(slots) < MIN_DENSITY * (high - low + 1)):
        where: slice | Tensor = torch.tensor(slots, device=device)
        place = list(range(len(slots)))
    else:
        where = slice(low, high + 1, step)
        place = [(slot - low) // step for slot in slots]
    count = max(place) + 1
    owner = [0] * count
    for p, (_, request) in zip(place, members, strict=True):
        owner[p] = request
    mask: Tensor | None = None
    if valid is not None:
        num_tokens = max(valid)
        if min(valid) < num_tokens:
            length = [num_tokens] * count
            for p, n in zip(place, valid, strict=True):
                length[p] = n
            hidden = torch.arange(num_tokens, device=device) >= torch.tensor(length, device=device)[:, None]
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))[:, None, None, :]
    return BlockGroup(where, torch.tensor(owner, device=device), num_tokens, mask, count), place


def _make_order(parts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    most = max(len(mine) for mine in parts)
    rows = [mine + mine[:1] * (most - len(mine)) for mine in parts]
    missing = None
    if any(len(mine) < most for mine in parts):
        missing = torch.tensor([[i >= len(mine) for i in range(most)] for mine in parts], device=device)
    return torch.tensor(rows, device=device), missing


def paged_decode(q: Tensor, pages: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """Attention of one query per request over its blocks.

    Shapes:  q [B, HQ, D];  pages [S, 2, H, T, D], one layer's view of the arena;  returns [B, HQ, D] in q's dtype
    Equal to ``paged_decode_reference`` up to rounding; computes in the pages' dtype with float32 sums.
    """
    num_kv_heads, head_dim = pages.shape[2], q.shape[-1]
    grouped = q.view(q.shape[0], num_kv_heads, -1, head_dim).to(pages.dtype)
    outs, lses = [], []
    for group in plan.groups:
        for out, lse in _attend_group(grouped, pages, group, scale):
            outs.append(out)
            lses.append(lse)
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    if plan.order is None:
        return out.reshape(q.shape).to(q.dtype)
    if plan.order.shape[1] == 1:
        return out[plan.order[:, 0]].reshape(q.shape).to(q.dtype)
    lse = torch.cat(lses) if len(lses) > 1 else lses[0]
    lse = lse[plan.order]
    if plan.missing is not None:
        lse = lse.masked_fill(plan.missing[:, :, None, None], float("-inf"))
    return merge_parts(out[plan.order], lse).reshape(q.shape).to(q.dtype)


def _attend_group(q: Tensor, pages: Tensor, group: BlockGroup, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Outputs [n, H, G, D] and log-sum-exps [n, H, G] of the group's slots, in pieces of bounded scratch."""
    queries = q[group.queries] if len(q) > 1 or group.num_slots > 1 else q
    if isinstance(group.slots, slice):
        kv = pages[group.slots, :, :, : group.num_tokens]
        return [partial_attention(queries, kv[:, 0], kv[:, 1], scale=scale, mask=group.mask)]
    pieces = []
    for start in range(0, group.num_slots, GATHER_BLOCKS):
        piece = slice(start, start + GATHER_BLOCKS)
        kv = pages[:, :, :, : group.num_tokens].index_select(0, group.slots[piece])
        mask = None if group.mask is None else group.mask[piece]
        pieces.append(partial_attention(queries[piece], kv[:, 0], kv[:, 1], scale=scale, mask=mask))
    return pieces
