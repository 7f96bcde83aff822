"""Bugs put in on purpose. Each has to be found by the simulator; one that survives shows an invariant that is missing."""

from __future__ import annotations

from itertools import count

from .code import Patch
from .options import draw
from .simulator import OutOfEvents, Simulation

MUTANTS = (
    # ---- arena
    Patch("a slot is handed out twice", "arena", "slot = Slot(heapq.heappop(slab.free), nbytes)", "slot = Slot(slab.free[0], nbytes)"),
    Patch("the grid of a slab begins one byte late", "arena", "slab.free = [slab.base + i * nbytes", "slab.free = [slab.base + 1 + i * nbytes"),
    Patch("a slab is carved into one slot too many", "arena", "for i in range(self.per_slab(nbytes))]\n", "for i in range(self.per_slab(nbytes) + 1)]\n"),
    Patch("a freed slot is forgotten", "arena", "            heapq.heappush(slab.free, slot.address)\n            self._partial", "            self._partial"),
    Patch("an empty slab does not return to the pool", "arena", "            heapq.heappush(self._pool, number)\n", "            pass\n"),
    Patch("used bytes are not counted down", "arena", "        self.used_nbytes -= slot.nbytes\n", ""),
    Patch("live slots are not counted down", "arena", "        self.live[slot.nbytes] -= 1\n", ""),
    Patch("room forgets the reserve", "arena", "return max(0, (self.num_slabs - self.reserve - others)", "return max(0, (self.num_slabs - others)"),
    Patch("has_room forgets the reserve", "arena", "return self.slabs_for(wanted) <= self.num_slabs - self.reserve", "return self.slabs_for(wanted) <= self.num_slabs"),
    Patch("packed slabs are rounded down", "arena", "return sum(-(-number // self.per_slab(nbytes))", "return sum((number // self.per_slab(nbytes))"),
    Patch("the reserve is for nobody", "arena", "if len(self._pool) <= (0 if urgent else self.reserve):", "if len(self._pool) <= self.reserve:"),
    Patch("evacuation takes the sparsest slab whether or not it fits", "arena", "if needed <= room and (best is None", "if needed and (best is None"),
    Patch("evacuation is not tried", "arena", "            if len(partial) < 2:\n", "            if len(partial) < 9:\n"),
    Patch("a full slab stays filed as partial", "arena", "            self._partial[nbytes].discard(number)\n        self.live[nbytes] += 1", "            pass\n        self.live[nbytes] += 1"),
    # ---- tables
    Patch("a shared block is not counted", "table", "            block.refs += 1\n            block.holders.append(floor)", "            block.holders.append(floor)"),
    Patch("a request's blocks are not taken back", "table", "            self._lift_floor(block)\n            self.drop(block)\n", "            self._lift_floor(block)\n"),
    Patch("the floor of a new holder is ignored", "table", "                block.floor = min(block.holders)\n                table.blocks", "                table.blocks"),
    Patch("a floor outlives who asked for it", "table", "        block.floor = floor\n        for table in", "        for table in"),
    Patch("settled blocks are not looked at again when a floor is lifted", "table", "            table.num_settled = 0\n", "            pass\n"),
    Patch("an old slot is freed within its wave", "table", "            self._retiring.append(block.slot)\n            self._owner[slot] = block", "            self.arena.release(block.slot)\n            self._owner[slot] = block"),
    Patch("retired slots are never freed", "table", "            self.arena.release(slot)\n        self._retiring.clear()", "            pass\n        self._retiring.clear()"),
    Patch("a wave is lost", "table", "            self.waves.append(wave)\n", "            pass\n"),
    Patch("a move starts from the new address", "table", "wave.append(Move(block, block.slot.address, slot.address, block.rung, rung))", "wave.append(Move(block, slot.address, slot.address, block.rung, rung))"),
    Patch("a copy does not change the table", "table", "            block.slot = new\n", "            pass\n"),
    Patch("a fresh slot is not cleared after a copy", "table", "                self._fresh[new] = None\n", "                pass\n"),
    Patch("a fresh slot is not noted", "table", "        self._fresh[slot] = None\n", ""),
    Patch("the recent window is ignored", "table", "newest = num_computed - self.ladder.recent - self.ladder.sink", "newest = num_computed - self.ladder.sink"),
    Patch("the sink is forgotten when ages are counted", "table", "newest = num_computed - self.ladder.recent - self.ladder.sink", "newest = num_computed - self.ladder.recent"),
    Patch("a block is old one block too early", "table", "newest - (index + 1) * BLOCK_TOKENS", "newest - index * BLOCK_TOKENS"),
    Patch("a new rung is not noted in the block", "table", "block.slot, block.rung = slot, rung\n", "block.slot = slot\n"),
    Patch("blocks by rung are not counted", "table", "            self.num_blocks[rung] += 1\n            # The old", "            # The old"),
    Patch("a demotion gives up before it frees its wave", "table", "                slot = self.arena.allocate(self._sizes[rung], urgent=True)\n            while", "            while"),
    Patch("a sink as large as a block is not counted", "table", "        extra[self._sizes[SINK]] += sinks  # may be the same size\n", "        extra[self._sizes[SINK]] = max(sinks, extra[self._sizes[SINK]])\n"),
    Patch("room for a sink is not looked for", "table", "        if sinks and not self._has_room(0, sinks):\n            return 0\n", ""),
    Patch("the spare blocks are promised away", "table", "max(0, room - spare) * BLOCK_TOKENS", "max(0, room) * BLOCK_TOKENS"),
    # ---- prefix cache
    Patch("salts are ignored", "prefix", "repr((salt, self._model,", "repr((self._model,"),
    Patch("only the newest block decides a hit", "prefix", "            key = _extend(key, tokens[end:stop])\n            entry", "            key = _extend(self._root(salt), tokens[end:stop])\n            entry"),
    Patch("a block is filed before it is full", "prefix", "range(sink + BLOCK_TOKENS, num_tokens + 1, BLOCK_TOKENS)", "range(sink + BLOCK_TOKENS, num_tokens + 2, BLOCK_TOKENS)"),
    Patch("the cache holds no reference", "prefix", "                blocks[index].refs += 1\n", ""),
    Patch("a hit may be narrower than the floor", "prefix", "or entry.block.rung > floor:", "or entry.block.rung > 99:"),
    Patch("blocks in use are given up", "prefix", "            if entry.block.refs == 1:\n                if not", "            if entry.block.refs >= 1:\n                if not"),
    Patch("idle blocks before one in use are kept", "prefix", "        if inner is not None:  #", "        if False:  #"),
    Patch("bad values stay on offer", "prefix", "        for key in [key for key, entry in self._entries.items() if id(entry.block) in doubtful]:", "        for key in [key for key, entry in self._entries.items() if id(entry.block) in doubtful][1:]:"),
    # ---- space
    Patch("every token may come from the cache", "space", "floor, request.num_tokens - 1)", "floor, request.num_tokens)"),
    Patch("pinned requests are as others", "space", "        if params.kv_pinned:\n            return 0", "        if params.kv_pinned:\n            return self.num_rungs - 1"),
    Patch("admission looks at the newcomer alone", "space", "fits(self._demand([*running, request]))", "fits(self._demand([request]))"),
    Patch("admission forgets what may still be written", "space", "        return request.max_num_tokens\n", "        return request.num_tokens\n"),
    Patch("what a failed request shared is still offered", "space", "            self.prefix.purge(self.tables[request.request_id])\n", "            pass\n"),
    Patch("an ended request's place in the cache is kept", "space", "            self.prefix.forget(request.request_id)\n", "            pass\n"),
    # ---- pressure
    Patch("the hottest block steps down first", "pressure", "newness = 1 if payer is None else -age", "newness = 1 if payer is None else min(1, age - 10**9) if age >= 0 else 1"),
    Patch("blocks in the recent window step down", "pressure", "if candidate.newness <= 0]", "if candidate.newness <= 10**9]"),
    Patch("a shared block is named twice", "pressure", "        return [candidate for candidate in found.values() if candidate.newness <= 0]", "        both = [candidate for candidate in found.values() if candidate.newness <= 0]\n        return both + [c for c in both if c.shared][:1]"),
    Patch("cached blocks are given up last", "pressure", "        if self.space.evict():\n            return True\n        return self.space.num_rungs > 1 and self._step_down(request.params.tenant, RELIEF_BLOCKS) > 0", "        return (self.space.num_rungs > 1 and self._step_down(request.params.tenant, RELIEF_BLOCKS) > 0) or self.space.evict()"),
    Patch("there is no relief", "pressure", "        while not self.space.reserve(request, num_tokens):\n            if not self._relieve(request):\n                return False", "        while not self.space.reserve(request, num_tokens):\n            return False"),
    Patch("it looks ahead without need", "pressure", "        if self.space.free_blocks() < len(self.running):\n            while", "        if True:\n            while"),
    Patch("a chunk takes the others' next blocks", "pressure", "spare = sum(self.space.needs_block(other) for other in self.running if other is not request)", "spare = 0"),
    Patch("what was found for one step serves the next", "pressure", '"""Forgets what the previous step found; then steps down what an eager ladder or the near future asks."""\n        self.forget()', '"""Forgets nothing."""'),
    Patch("all of memory steps down at once", "pressure", "RELIEF_BLOCKS = 8", "RELIEF_BLOCKS = 800"),
    Patch("eager blocks step down during the prompt", "pressure", "ready = [r for r in self.running if r.num_computed_tokens >= r.num_prompt_tokens]", "ready = list(self.running)"),
    Patch("quotas protect nobody", "pressure", "            if name == tenant or name in over:\n", "            if True:\n"),
    Patch("the oldest gives way", "pressure", "    return running.youngest", "    return running.oldest"),
    # ---- scheduler
    Patch("what can never fit is taken", "scheduler", "        if request.max_num_tokens > capacity:", "        if request.max_num_tokens > 2 * capacity:"),
    Patch("the budget is not counted down", "scheduler", "                items.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))\n                budget -= num_tokens", "                items.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))"),
    Patch("a preempted request keeps its blocks", "scheduler", "        free = self.space.free_blocks()\n        self.running.remove(request)\n        self.space.release(request)", "        free = self.space.free_blocks()\n        self.running.remove(request)"),
    Patch("a preempted request is lost", "scheduler", "        self.num_preemptions += 1\n        self.waiting.add(request)", "        self.num_preemptions += 1"),
    Patch("a preempted request is thought computed", "scheduler", "        request.num_computed_tokens = 0\n        request.num_preemptions += 1", "        request.num_preemptions += 1"),
    Patch("an abort leaks the blocks", "scheduler", "        if error is None:\n            self.space.release(request)", "        if error is None and reason is not FinishReason.ABORT:\n            self.space.release(request)"),
    Patch("a failed request is released as a good one", "scheduler", "            self.space.discard(request)", "            self.space.release(request)"),
    Patch("recovery forgets who ran", "scheduler", "                request.status, request.num_computed_tokens = RequestStatus.WAITING, 0\n                self.waiting.add(request)", "                self.waiting.add(request)"),
    Patch("sharers are not taken into account at once", "scheduler", "                self.pressure.forget()  # the blocks it shares are its own too now\n", "                pass\n"),
    Patch("the number of running requests is not bounded", "scheduler", "            if not budget or len(self.running) == self.max_num_seqs:", "            if not budget:"),
    Patch("one token too many is computed", "scheduler", "        item.request.num_computed_tokens = item.end\n", "        item.request.num_computed_tokens = min(item.end + 1, item.request.num_tokens)\n"),
)  # fmt: skip

# What make test tries: bugs of every module, found quickly.
QUICK = (0, 9, 19, 22, 29, 36, 40, 52, 63, 66)


def hunt(patch: Patch, limit: int = 50_000) -> tuple[int, str] | None:
    """Simulates until the bug shows: the events it took and what was said. ``None`` if it lives for ``limit`` events."""
    spent = 0
    for seed in count():
        simulation = Simulation(draw(seed), patch)
        simulation.limit = limit - spent
        try:
            simulation.run(400)
        except OutOfEvents:
            return None
        except Exception as error:
            return spent + simulation.num_events, f"{type(error).__name__}: {error}"
        spent += simulation.num_events
    return None
