"""Admission checked anew: the demand of all running requests is added up each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from .options import Group, Options


class Admission:
    """Adds up the memory that requests may come to need, one by one."""

    def __init__(self, tables: Any, options: Options, open_end_tokens: int):
        self.tables, self.options, self.open_end_tokens = tables, options, open_end_tokens

    def demand(self, requests: Sequence[Any], floors: Sequence[int], rung: int) -> Counter[int]:
        """Slots by size that requests take on their floors, or on ``rung`` where that is wider."""
        demand: Counter[int] = Counter()
        for request, floor in zip(requests, floors, strict=True):
            most = request.max_num_tokens
            if request.params.max_tokens is None:
                most = min(most, max(request.num_tokens, request.num_prompt_tokens) + self.open_end_tokens)
            for group in self.options.groups:
                at = group.floors[min(floor, rung)]
                dense, narrow = most_blocks(group, group.blocks_for(most), at > 0)
                demand[group.sizes[0]] += dense
                demand[group.sizes[at]] += narrow
                demand.update(group.slot_sizes(min(floor, rung)))
        return +demand

    def admits(self, requests: Sequence[Any], floors: Sequence[int]) -> bool:
        """Whether the running requests, all of ``requests`` but the last, leave room for the last."""
        last, at = len(self.options.sizes) - 1, self.options.admit_at
        if len(requests) == 1:
            return True
        if at < last and not self.tables.fits(self.demand(requests, floors, at)):
            return False
        return bool(self.tables.fits_whatever_stepped_down(self.demand(requests, floors, last), floors))

    def within_quota(self, requests: Sequence[Any], floors: Sequence[int]) -> bool:
        """Whether the last of ``requests`` and its tenant's running ones stay within the tenant's share."""
        quota, tenant = self.options.quota, requests[-1].params.tenant
        same = [(r, floor) for r, floor in zip(requests, floors, strict=True) if r.params.tenant == tenant]
        if quota is None or len(same) == 1:
            return True
        return bool(self.tables.fits(self.demand(*zip(*same, strict=True), self.options.admit_at), quota))


@cache
def most_blocks(group: Group, number: int, steps_down: bool) -> tuple[int, int]:
    """The most blocks that a request of ``number`` blocks has dense at once, and stepped down, each when one begins."""
    dense = narrow = 0
    for count in range(1, number + 1):
        begins = group.end(count - 2)
        passed = group.num_passed(begins)
        older = max(0, group.num_aged(begins) - passed) if steps_down else 0
        dense, narrow = max(dense, count - passed - older), max(narrow, older)
    return dense, narrow
