"""The books of host memory and the bytes behind them, checked after events; faults of what moves there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .broken import require

if TYPE_CHECKING:
    from .simulator import Simulation
    from .spy import SpySpace


def check_tier(space: SpySpace) -> list[Any]:
    """Checks the books of host memory; returns the blocks that wait for their bytes."""
    tier = space.hosted.tier
    if tier is None:
        return []
    arena, pieces = tier.arena, list(tier._pieces.values())
    arena.check_integrity()
    copies = [copy for piece in pieces for copy in piece.held()]
    read = [copy.slot for copy in space.hosted.coming()]
    slots = [copy.slot for copy in copies] + tier._leaving + read
    require(len(set(slots)) == len(slots), "a slot of host memory has two copies")
    require(all(slot.alive for slot in slots), "a copy has a slot that was freed")
    require(sum(slot.nbytes for slot in slots) == arena.used_nbytes <= arena.nbytes, "bytes of host memory are lost")
    used = tier._busy.keys() | tier._held
    require(all(slot in used for slot in tier._leaving), "a slot is kept for nobody")
    require(space.hosted.held() == tier._held, "the disk has other slots than it is told")
    space.hosted.sources.update((copy, copy.source) for copy in tier._unsure)
    places = {piece.key: place for place, piece in enumerate(pieces)}
    for place, piece in enumerate(pieces):
        require(tier._pieces[piece.key] is piece and any(piece.blocks), "a piece without copies is kept")
        require(places.get(piece.parent, place + 1) > place, "a piece is used later than the one before it")
        for index, copy in enumerate(piece.blocks):
            if copy is not None:
                size = space.options.groups[index].size(copy.rung)
                require(copy.group == index and copy.slot.nbytes == size, "a copy has a slot of another size")
                require((copy.source is None) == (copy not in tier._unsure), "it is unknown what a copy is of")
    require(all(space.hosted._copy(p.key, c.group) is c for c, p in tier._unsure.items()), "a copy is gone and unsure")
    require(all(space.hosted._copy(p.key, c.group) is c for c, p in tier._writes.items()), "a copy is gone and written")
    stats = tier.stats()
    require((stats.used_nbytes, stats.num_blocks) == (arena.used_nbytes, len(copies)), "host memory is miscounted")
    return [fetch.block for fetch in tier._fetches.values()]


def check_copies(simulation: Simulation) -> None:
    """Checks that copies that have come hold the tokens of their pieces, and none values known to be bad."""
    tier, device, model = simulation.space.hosted.tier, simulation.device, simulation.model
    if tier is None:
        return
    doubtful = model.unknown.union(*(simulation.blocks_of(request) for request in model.tainted))
    for piece in tier._pieces.values():
        for copy in piece.held():
            if copy.command > tier.num_commands or device.host.is_late(copy.slot.address):
                continue
            record = device.host._at(copy.slot.address, copy.slot.nbytes)
            require(bool(record.path), "a copy has the bytes of nobody")
            require(record.path[-1] == copy.rung and record.group == copy.group, "a copy has other bytes")
            require(record.count == len(piece.tokens), "a copy is not full")
            source = simulation.space.hosted.sources[copy]
            require(not record.spoilt or source in doubtful, "bad values are kept")


def note_fetched(simulation: Simulation) -> None:
    """Notes that who is filled from a copy of values that nobody knows to be bad has such values, too."""
    hosted, unknown = simulation.space.hosted, simulation.model.unknown
    fetches = () if hosted.tier is None else hosted.tier._fetches.values()
    unknown.update(fetch.block for fetch in fetches if hosted.sources[fetch.copy] in unknown)


def spoil_moved(simulation: Simulation) -> set[Any]:
    """Has a block that steps down turn out bad now and then, wherever it goes in the same command."""
    options, rng = simulation.options, simulation.rng
    if not options.host_nbytes or rng.random() >= options.bad_blocks:
        return set()
    moves = [move for wave in simulation.space.tables.store.waves[:1] for move in wave if move.old != move.new]
    if not moves:
        return set()
    move = rng.choice(moves)
    simulation.device._at(move.src, options.groups[move.block.group].size(move.old)).spoilt = True
    simulation.model.unknown.add(move.block)
    return {move.block}


def draw_copy_nbytes(simulation: Simulation) -> int | None:
    """Bytes that may be copied beside the next step; None: any number."""
    options, rng = simulation.options, simulation.rng
    if not options.host_nbytes or rng.random() >= options.copies or not simulation.scheduler.running:
        return None
    return rng.randrange(4 * options.sizes[0])
