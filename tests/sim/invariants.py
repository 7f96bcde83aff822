"""Invariants after every event, reckoned from the tables alone, and invariants of every batch.

Arena: I1 bytes add up, I2 no byte has two owners, I3 slots lie on their grid, I4 no slot is lost and ``room`` is exact,
I5 references equal owners, I6 tables name live blocks and enough of them, I7 a block never widens and its slot is as
large as its rung, I8 floors of all holders hold, I14 and I15 (spy) bytes won and counters equal the replayed log. I10,
I12 and I13 live on the device: reads return the bytes written, fresh slots are cleared, no request reads another's
bytes. I9 concerns metadata, which is tested with the formats; I11 concerns epochs, which are not needed: a block is one
object, so all its holders see it change.

Groups of layers: G1 what no later token sees is given back before the next batch is made, G2 a request that decodes
holds a window and two blocks at most, G5 groups hold the same tokens. The model has G3, all that a token sees is read,
and no more; the spy G4 bytes come back at once, G8 room is for all groups or none, G9 nothing steps down before; the
device G12 moves are of one group. G11 is S9, with the demand of all groups.

Sizes of memory: H1 no slot lies in the hole, H2 bytes add up, H3 the books stay within the size asked for. The device
has H4 nothing is read or written in the hole, the simulator H5 a size that is refused breaks a promise, and the
smallest one that is named does not, H6 a shrink comes to its end; S9 holds whatever the size.

Scheduler: S1 waiting or running, S2 waiting requests own nothing, S3 budget and room, S4 legal states, S8 order.
The simulator and ``check_batch`` have S3 to S7, S11 to S16, S18 and S20, the spy S8, S10 and S19. S9: where admission
sees all that requests may need nobody is preempted at all; elsewhere only the last one. S17, and S16 once more, need
real numbers: ``tests/engine/test_precision_schedule.py``. Threads (S13) are in ``tests/engine/test_engine.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from qkv_engine.request import RequestStatus

from .broken import require
from .spy import SpySpace
from .states import check_checkpoints
from .tier import check_tier


def check_books(space: SpySpace, seen: dict[Any, tuple[int, int]]) -> dict[Any, tuple[int, int]]:
    """Checks arena, tables and prefix cache; ``seen`` and the result: each block's rung at the last check and now."""
    tables, groups = space.tables, space.options.groups
    arena, store = tables.arena, tables.store
    owners: dict[Any, list[int]] = {}
    for index, group in enumerate(tables.groups):
        for block, floors in owners_of(group, index, space).items():
            require(block not in owners, "a block is in two groups")
            owners[block] = floors
    cached: dict[Any, int] = {}
    for (_, index), block in space.cached.blocks().items():
        require(block.group == index, "a block is filed as another group's")
        cached[block] = cached.get(block, 0) + 1
        owners.setdefault(block, [])
    for block in check_checkpoints(space):
        require(block not in owners, "a checkpoint's slot is in use")
        cached[block], owners[block] = 1, []
    copied = {move.block for wave in store.waves for move in wave if move.old == move.new or move.new < 0}
    for block in check_tier(space):  # the tier owns it as the cache does
        require(block not in owners, "a block that waits for its bytes is in use")
        cached[block], owners[block] = 1, []
    spans, used, live, now = [], 0, {}, {}
    rungs, entries = ([Counter[int]() for _ in groups] for _ in range(2))
    numbers = {(block.group, block.number) for block in owners}
    require(len(numbers) == len(owners), "two blocks have one number")
    slab_nbytes = arena.slab_nbytes
    for block, floors in owners.items():
        slot, rung, index = block.slot, block.rung, block.group
        size = groups[index].size(rung)
        require(slot.alive and slot.nbytes == size, "a block on rung {} has a slot of {} bytes", rung, slot.nbytes)
        require(block.refs == len(floors) + cached.get(block, 0), "{} references, {} tables", block.refs, len(floors))
        if len(floors) > 1 or block.holders != floors:
            require(sorted(block.holders) == sorted(floors), "holders are not the tables that name the block")
        is_state = rung < 0 and not index and groups[0].place(rung)[0] in space.options.state_slots
        last = groups[index].last(rung) if is_state else len(groups[index].sizes) - 1
        floor = min(floors) if floors else last
        require(block.floor == floor, "floor {}, its holders allow {}", block.floor, floor)
        require(rung <= floor, "rung {} below the floor {}", rung, floor)
        before = seen.get(block)
        is_new = before is None
        require(not is_new or slot in store._fresh or block in copied, "a new slot will not be cleared")
        require(before is None or before <= rung, "a block widened")
        now[block] = rung
        if size == arena.block_nbytes:
            require((arena.range_nbytes - slot.address) % size == 0, "a block is off its grid")
        else:
            offset = slot.address % slab_nbytes
            require(offset % size == 0 and offset + size <= slab_nbytes, "a slot is off its grid")
        spans.append((slot.address, size))
        used += size
        live[size] = live.get(size, 0) + 1
        rungs[index][rung] += 1
        if floors:
            entries[index][rung] += len(floors)
    spans.sort()
    end = 0
    for address, size in spans:
        require(address >= end, "two slots own byte {}", address)
        end = address + size
    require(end <= arena.range_nbytes, "a slot lies outside the arena")
    check_hole(space, spans)
    require(used == arena.used_nbytes <= arena.peak_nbytes, "{} bytes are owned, {} counted", used, arena.used_nbytes)
    require(live == +arena.live, "{} slots are owned, {} counted", live, arena.live)
    for group, found, named in zip(tables.groups, rungs, entries, strict=True):
        require(found == +group.num_blocks, "{} blocks by rung, {} counted", found, group.num_blocks)
        require(named == +group.num_entries, "{} table entries by rung, {} counted", named, group.num_entries)
    require(all(n < tables.groups[index].max_blocks for index, n in numbers), "a block's number is too high")
    require(not store._retiring, "slots wait to be released")
    require(+store.num_demotions == space.replayed, "demotions are miscounted")
    require(+store.num_idle_demotions == space.replayed_idle, "demotions of idle blocks are miscounted")
    return now


def check_hole(space: SpySpace, spans: list[tuple[int, int]]) -> None:
    """Checks H1 to H3: no slot lies in the hole, bytes add up, and the books stay within the size asked for."""
    arena, chunk = space.tables.arena, space.options.chunk_nbytes
    start, end = arena.hole.span
    require(start % chunk == end % chunk == 0, "a hole is off the chunks")
    require(start >= chunk or end == 0, "the first chunk goes")
    require(not any(address < end and start < address + size for address, size in spans), "a slot lies in the hole")
    held = arena.range_nbytes - (end - start)
    lost = chunk if end > start else 0
    require(arena.nbytes == held - lost, "books and hole disagree on the memory")
    slabs = max((number + 1 for number in arena._slabs), default=0) * arena.slab_nbytes
    blocks = arena.range_nbytes - min((slot.address for slot in arena._blocks.values()), default=arena.range_nbytes)
    require(slabs + blocks <= arena.nbytes, "slots take more than there is")
    gone = -(-(arena.range_nbytes - space.size_asked) // chunk) * chunk
    goal = arena.range_nbytes - gone - (chunk if gone else 0)
    require(arena.goal_nbytes == goal <= arena.nbytes, "{} bytes are promised, {} asked for", arena.goal_nbytes, goal)
    require(arena.nbytes == goal or end - start <= gone, "more is taken than was asked for")


def owners_of(group: Any, index: int, space: SpySpace) -> dict[Any, list[int]]:
    """The blocks in the tables of a group, each with the floors of the tables that name it."""
    options, owners = space.options, dict[Any, list[int]]()
    has_bank, own = options.has_bank and not index, options.groups[index]
    for name, table in group._tables.items():
        missing = table.num_slots - len(table.slots)  # the sink's, given back
        require(missing in ((0, 1) if options.groups[index].visible and options.sink else (0,)), "a slot is lost")
        for number, block in enumerate(table.slots, missing):
            require(own.place(block.rung)[0] == number, "a slot is on another's rung")
            require((number == 0 and options.sink > 0) or block.refs == 1, "a slot without tokens is shared")
            is_state = not index and number in options.state_slots
            step = own.state_floors[space.tables._floors[name]] if is_state and options.state_below else 0
            owners.setdefault(block, []).append(own.slot_rung(number, step) if is_state else table.floor)
        require(table.num_slots <= len(own.slots), "a request has a slot too many")
        check_bank(table, has_bank)
        for number, block in enumerate(table.blocks):
            require(block.rung >= 0, "a slot stands among the blocks")
            settled = number < table.num_settled and table.floor_epoch == group.floor_epoch
            require(not settled or block.rung >= block.floor, "a block is forgotten as settled")
            owners.setdefault(block, []).append(table.floor)
    require(all(block.group == index for block in owners), "a table names another group's block")
    return owners


def check_bank(table: Any, has_bank: bool) -> None:
    """Checks that a request with slots has a bank if the ladder has banks, mined if blocks are sealed."""
    bank = table.bank
    require((bank is not None) == bool(has_bank and table.slots), "a request has no bank, or one too many")
    require(all(block.bank is bank for block in table.blocks), "a block is of another bank")
    if bank is not None:
        require(bank.block is table.slots[-1] and bank.blocks is table.blocks, "a bank is of another request")
        require(bank.is_mined == any(block.rung for block in table.blocks), "a bank is not mined with the first seal")


def check_room(space: SpySpace) -> None:
    """Checks the arena's room against the slabs, counted again; free slabs and slots add up."""
    arena, memory = space.tables.arena, space.memory
    live, limit = memory.live(), memory.limit()
    for size in {size for group in space.options.groups for size in group.all_sizes()}:
        require(arena.room(size) == memory.room(size, live, limit), "room for {} slots of {}", arena.room(size), size)
    for places, taken in ((arena._slab_places, arena._slabs), (arena._block_places, arena._blocks)):
        require(sorted([*places.free, *taken]) == list(range(places.extent)), "a place is lost, or free and in use")
        require(places.extent == 0 or places.extent - 1 in taken, "a free place is kept at the end")
    require(arena._gap >= 0, "blocks and slabs overlap")
    for number, slab in arena._slabs.items():
        taken = {*slab.live, *slab.free}
        require(len(taken) == len(slab.live) + len(slab.free), "slab {} has a slot twice", number)
        require(len(taken) == arena.slab_nbytes // slab.slot_nbytes, "slab {} lost a slot", number)
    space.cached.check_ages()
    if space.prefix is not None:
        children = Counter(entry.parent for entry in space.prefix._entries.values())
        require(children == space.prefix._children, "the prefix cache miscounts what follows its blocks")
        idle = sum(block.slot.nbytes for block in space.cached.blocks().values() if block.refs == 1)
        require(space.prefix.idle.nbytes == idle, "idle bytes are miscounted")


def check_queues(scheduler: Any, space: SpySpace) -> None:
    """Checks registry, queues, states, order, and that blocks suffice for all computed tokens."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    together = running + waiting
    require(len(running) <= scheduler.max_num_seqs, "too many run")
    require(len(together) == len(scheduler.requests), "a request is lost or doubled")
    for queue in (running, waiting):
        places = [(request.params.priority, request.arrival) for request in queue]
        require(places == sorted(places), "a queue is out of order")
    previous: dict[tuple[str, int], int] = {}
    for request in together:  # equal requests of a tenant: the running ones came before the waiting ones
        if request in space.hosted.waits:  # others may start while blocks come for it
            continue
        own = space.options.quota or space.options.takes_turns
        equals = request.params.tenant if own else "", request.params.priority
        require(request.arrival > previous.get(equals, -1), "a later request runs before an earlier one")
        previous[equals] = request.arrival
        require(scheduler.requests.get(request.request_id) is request, "the registry disagrees")
        require(request.num_computed_tokens <= request.num_tokens, "more is computed than known")
    if space.prefix is not None:
        published = space.prefix._published
        require(all(name in space.tables for name in published), "the prefix cache remembers who is gone")
    for group in space.tables.groups:
        require(len(group._tables) == len(running), "someone owns blocks who does not run")
    for request in running:
        require(request.status is RequestStatus.RUNNING, "a running request is in another state")
        have = [request.request_id in group._tables for group in space.tables.groups]
        require(all(have), "a running request has no table")
        require(space.holdings.held(request) >= request.num_computed_tokens, "computed tokens have no block")
    for request in waiting:
        require(request.status is RequestStatus.WAITING, "a waiting request is in another state")
        require(request.num_computed_tokens == 0, "a waiting request has computed tokens")


def check_batch(batch: Any, scheduler: Any, space: SpySpace, ahead: bool) -> int:
    """Checks a batch, perhaps ``ahead`` of a step under way; returns its items whose tokens are not known yet."""
    options, num_ahead = space.options, 0
    waits = ahead or space.hosted.under_way
    require(waits or batch.num_tokens > 0 or not scheduler.requests, "an empty step")
    require(batch.num_tokens <= options.budget, "{} tokens in a step", batch.num_tokens)
    names = [item.request.request_id for item in batch.items]
    require(len(set(names)) == len(names), "a request is twice in a batch")
    first = scheduler.running.first if scheduler.running else None
    advances = first is None or first in [item.request for item in batch.items]
    require(advances or first.num_in_flight > 0, "the first does not advance")
    chunks = [item.num_tokens > 1 for item in batch.items]
    require(chunks == sorted(chunks), "single tokens do not come first")
    for item in batch.items:
        request = item.request
        require(request in scheduler.running, "someone is computed who does not run")
        require(request.num_computed_tokens == item.end <= request.num_tokens, "not the next tokens")
        require(item.end <= request.max_num_tokens, "a token is computed that nobody asked for")
        if item.end > len(request.token_ids):  # the step before samples it
            require(ahead and item.start == len(request.token_ids), "tokens nobody knows are computed")
            require(item.num_tokens == 1 == item.samples, "a token in flight is not the last")
            require(not request.needs_tokens, "the host has to see a token first")
            num_ahead += 1
        for group, table in zip(options.groups, space.holdings.tables_of(request), strict=True):
            require(table.num_slots == len(group.slots), "a request lacks a slot")
            blocks, found = group.blocks_for(item.end), table.first + len(table.blocks)
            require(found == blocks, "{} blocks for {} tokens", found, item.end)
        if request.params.num_prefill_tokens is not None:
            check_scored(item, space)
    check_passed(batch, scheduler, space)
    space.states.check_batch(batch)
    space.check_work()
    return num_ahead


def check_passed(batch: Any, scheduler: Any, space: SpySpace) -> None:
    """Checks G1 and G2: no blocks out of sight are held, and who decodes holds no more than a window."""
    starts = {item.request: item for item in batch.items}
    for request in scheduler.running:
        item = starts.get(request)
        start = request.num_computed_tokens if item is None else item.start
        for group, table in zip(space.options.groups, space.holdings.tables_of(request), strict=True):
            require(table.first == group.num_passed(start), "a block is kept that no token sees, or one is gone")
            has_sink = table.num_slots == len(table.slots)
            require(not group.sink or has_sink == group.sees_sink(start), "a sink is kept that no token sees")
            if group.visible is not None and item is not None and item.num_tokens == 1:
                most, found = group.visible // group.block + 2, len(table.blocks)
                require(found <= most, "{} blocks of a window of {} tokens", found, group.visible)


def check_scored(item: Any, space: SpySpace) -> None:
    """Each token of a scored request attends to what it would attend to if it were computed alone."""
    request, options = item.request, space.options
    if item.start < request.num_prefill_tokens:
        require(item.end <= request.num_prefill_tokens, "a chunk goes on behind the prefill")
        return
    for group, table in zip(options.groups, space.holdings.tables_of(request), strict=True):
        num_aged = group.num_aged(item.start)
        if group.floors[options.floor(request.params)]:
            require(group.num_aged(item.end - 1) == num_aged, "a block could step down inside a chunk")
        if options.eager:
            aged = table.blocks[: max(0, num_aged - table.first)]
            require(all(block.rung >= block.floor for block in aged), "a token attends to a block above its floor")
