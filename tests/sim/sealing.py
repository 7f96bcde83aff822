"""Seals checked anew: under which bank, and from which tokens it is mined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .broken import require

if TYPE_CHECKING:
    from .spy import SpySpace


def check_sealing(space: SpySpace, move: Any) -> None:
    """Checks that a block is sealed under its request's bank, mined before the first seal from computed tokens."""
    options = space.options
    if not options.has_bank or move.old or not move.new:
        require(move.bank is None and move.mining is None, "a block that is not sealed needs no bank")
        return
    owners = [r for r in space.scheduler.running if move.block in space.holdings.tables_of(r)[0].blocks]
    require(len(owners) == 1 and move.bank is not None, "a block under no bank, or under several")
    request, table = owners[0], space.holdings.tables_of(owners[0])[0]
    bank = table.slots[-1]
    require((move.mining is not None) == (bank not in space.mined), "a bank is not mined with the first seal")
    end = options.groups[0].end(table.blocks.index(move.block))
    require(end <= request.num_computed_tokens, "a block is sealed before it is full")
    ends = options.window_ends(request.num_prefill_tokens, end)
    require(move.num_windows == len(ends), "a block may choose from other patterns")
    if move.mining is not None:
        space.mined.add(bank)
        prompt = max(options.block, request.num_prefill_tokens - options.sink)
        number = min(prompt, request.num_computed_tokens - options.sink)
        require(move.mining.num_tokens == number >= options.block, "a bank is mined from other tokens")
        require(len(move.mining.addresses) == -(-number // options.block), "a bank is mined from other blocks")
