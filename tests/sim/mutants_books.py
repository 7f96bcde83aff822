"""Bugs put into arena, tables, prefix cache and space on purpose."""

from __future__ import annotations

from .code import Patch

BOOKS = (
    Patch(
        "a slot is handed out twice",
        "arena",
        "slot = Slot(heapq.heappop(slab.free), nbytes)",
        "slot = Slot(slab.free[0], nbytes)",
    ),
    Patch(
        "the grid of a slab begins one byte late",
        "arena",
        "[base + i * nbytes",
        "[base + 1 + i * nbytes",
    ),
    Patch(
        "a slab is carved into one slot too many",
        "arena",
        "for i in range(self.per_slab(nbytes))])\n",
        "for i in range(self.per_slab(nbytes) + 1)])\n",
    ),
    Patch(
        "a freed slot is forgotten",
        "arena",
        "            heapq.heappush(slab.free, slot.address)\n            self._file",
        "            self._file",
    ),
    Patch(
        "an empty slab does not return to the pool",
        "arena",
        "            self._slab_places.give(number)\n",
        "            pass\n",
    ),
    Patch(
        "a slab is not counted when it is begun",
        "arena",
        "self._num_packed += self.live[nbytes] % self.per_slab(nbytes) == 0",
        "self._num_packed += self.live[nbytes] == 0",
    ),
    Patch(
        "a slab is counted when it is empty",
        "arena",
        "self._num_packed -= self.live[slot.nbytes] % self.per_slab(slot.nbytes) == 0",
        "self._num_packed -= self.live[slot.nbytes] == 0",
    ),
    Patch("used bytes are not counted down", "arena", "        self.used_nbytes -= slot.nbytes\n", ""),
    Patch("live slots are not counted down", "arena", "        self.live[slot.nbytes] -= 1\n", ""),
    Patch(
        "room forgets the reserve",
        "arena",
        "        spare = self._spare_nbytes\n        if spare",
        "        spare = self._spare_nbytes + self.reserve_nbytes\n        if spare",
    ),
    Patch(
        "has_room forgets the reserve",
        "arena",
        "return needed <= self._spare_nbytes",
        "return needed <= self._spare_nbytes + self.reserve_nbytes",
    ),
    Patch(
        "packed slabs are rounded down",
        "arena",
        "else -(-number // self.per_slab(nbytes)) * self.slab_nbytes",
        "else (number // self.per_slab(nbytes)) * self.slab_nbytes",
    ),
    Patch(
        "the reserve is for nobody",
        "arena",
        "        if not urgent and not self.room(nbytes):",
        "        if not self.room(nbytes):",
    ),
    Patch(
        "a free place of a block is forgotten",
        "arena",
        "            self._block_places.give(number)\n",
        "            pass\n",
    ),
    Patch(
        "slabs grow over the blocks",
        "arena",
        "slabs, blocks = self._slab_places.extent * self.slab_nbytes, self._block_places.extent * self.block_nbytes",
        "slabs, blocks = self._slab_places.extent * self.slab_nbytes, len(self._blocks) * self.block_nbytes",
    ),
    Patch(
        "blocks stay where they are while a slab is wanted",
        "arena",
        "        return self._move_blocks() or self._empty(",
        "        return self._empty(",
    ),
    Patch(
        "slabs stay where they are while a block is wanted",
        "arena",
        "self._empty(self._last_slabs() or self._sparsest())",
        "self._empty(self._sparsest())",
    ),
    Patch(
        "the reserve is a slab whatever rungs leave free",
        "table",
        "    return slab_nbytes + sum(left[",
        "    return slab_nbytes + 0 * sum(left[",
    ),
    Patch(
        "evacuation is not tried", "arena", "            if len(partial) < 2:\n", "            if len(partial) < 9:\n"
    ),
    Patch(
        "a full slab stays filed as partial",
        "arena",
        "            self._partial[nbytes].discard(number)\n        self._num_packed",
        "            pass\n        self._num_packed",
    ),
    Patch(
        "a shared block is not counted",
        "table",
        "            block.refs += 1\n            insort(block.holders, floor)",
        "            insort(block.holders, floor)",
    ),
    Patch(
        "a request's blocks are not taken back",
        "table",
        "            self._lift_floor(block)\n            self.drop(block)\n",
        "            self._lift_floor(block)\n",
    ),
    Patch(
        "the floor of a new holder is ignored",
        "table",
        "            block.floor = block.holders[0]\n",
        "",
    ),
    Patch(
        "a floor outlives who asked for it",
        "table",
        "            block.floor = floor\n            self.floor_epoch",
        "            self.floor_epoch",
    ),
    Patch(
        "settled blocks are not looked at again when a floor is lifted",
        "block",
        "            self.num_settled, self.floor_epoch = 0, floor_epoch\n",
        "            self.floor_epoch = floor_epoch\n",
    ),
    Patch(
        "an old slot is freed within its wave",
        "table",
        "            self._retiring.append(block.slot)\n            self._owner[slot] = block",
        "            self.arena.release(block.slot)\n            self._owner[slot] = block",
    ),
    Patch(
        "retired slots are never freed",
        "table",
        "            self.arena.release(slot)\n        self._retiring.clear()",
        "            pass\n        self._retiring.clear()",
    ),
    Patch("a wave is lost", "table", "            self.waves.append(wave[:])\n", "            pass\n"),
    Patch(
        "a move starts from the new address",
        "block",
        "where = block, block.slot.address, slot.address, block.rung, rung",
        "where = block, slot.address, slot.address, block.rung, rung",
    ),
    Patch("a copy does not change the table", "table", "            block.slot = new\n", "            pass\n"),
    Patch("a fresh slot is not noted", "table", "        self._fresh[slot] = None\n", ""),
    Patch(
        "the recent window is ignored",
        "table",
        "return self.group.recent.older(num_computed) - self.group.sink",
        "return num_computed - self.group.sink",
    ),
    Patch(
        "the sink is forgotten when ages are counted",
        "table",
        "return self.group.recent.older(num_computed) - self.group.sink",
        "return self.group.recent.older(num_computed)",
    ),
    Patch(
        "a block is old one block too early",
        "table",
        "newest - (index + 1) * self.group.block_tokens",
        "newest - index * self.group.block_tokens",
    ),
    Patch(
        "a new rung is not noted in the block", "table", "block.slot, block.rung = slot, rung\n", "block.slot = slot\n"
    ),
    Patch(
        "blocks by rung are not counted",
        "table",
        "            self.num_blocks[rung] += 1\n            self.num_entries",
        "            self.num_entries",
    ),
    Patch(
        "a shared block counts once among entries",
        "table",
        "            self.num_entries[rung] += len(block.holders)\n",
        "            self.num_entries[rung] += 1\n",
    ),
    Patch(
        "a block's number is given away while it lives",
        "table",
        "if self._spare_numbers else len(self._owner)\n",
        "if self._spare_numbers else max(0, len(self._owner) - 1)\n",
    ),
    Patch(
        "a demotion gives up before it frees its wave",
        "table",
        "            slot = self.arena.allocate(nbytes, urgent=True)\n        while",
        "            pass\n        while",
    ),
    Patch(
        "a slot as large as a block is not counted",
        "table",
        "sizes[slot.nbytes] = sizes.get(slot.nbytes, 0) + 1  #",
        "sizes[slot.nbytes] = max(sizes.get(slot.nbytes, 0), 1)  #",
    ),
    Patch(
        "room for a slot is not looked for",
        "table",
        "        if slots and not self._has_room(0, slots):\n            return 0\n",
        "",
    ),
    Patch(
        "the spare blocks are promised away",
        "table",
        "max(0, room - spare) * self.group.block_tokens",
        "max(0, room) * self.group.block_tokens",
    ),
    Patch("salts are ignored", "prefix", "repr((salt, self._model,", "repr((self._model,"),
    Patch(
        "only the newest block decides a hit",
        "prefix",
        'hashlib.sha256(key + array("q", tokens).tobytes())',
        'hashlib.sha256(array("q", tokens).tobytes())',
    ),
    Patch(
        "a block is filed before it is full",
        "prefix",
        "(num_tokens - sink) // block_tokens if",
        "(num_tokens - sink + 1) // block_tokens if",
    ),
    Patch("the cache holds no reference", "prefix", "                blocks[index].refs += 1\n", ""),
    Patch(
        "a hit may be narrower than the floor",
        "prefix",
        "or entry.block.rung > narrowest:",
        "or entry.block.rung > 99:",
    ),
    Patch(
        "a hit in the recent window may be narrow",
        "prefix",
        "narrowest = floor if index < num_narrow else 0",
        "narrowest = floor",
    ),
    Patch(
        "blocks in use are given up",
        "prefix",
        "            if entry is not None and entry.is_idle and entry.used == used:",
        "            if entry is not None and entry.used == used:",
    ),
    Patch(
        "idle blocks before one in use are kept", "prefix", "        if entry is not None:  #", "        if False:  #"
    ),
    Patch(
        "bad values stay on offer",
        "prefix",
        "for block in blocks if block in self._of_block]:",
        "for block in blocks if block in self._of_block][1:]:",
    ),
    Patch(
        "every token may come from the cache", "manager", "floor, request.num_tokens - 1)", "floor, request.num_tokens)"
    ),
    Patch(
        "pinned requests are as others",
        "manager",
        "floor, shared, prefix = request.floor, ",
        "floor, shared, prefix = self.num_rungs - 1, ",
    ),
    Patch(
        "admission looks at the newcomer alone",
        "manager",
        "        together = self.demand.total.plus(self.demand.share(request))\n        if self.spec.admit_at",
        "        together = Demand(self.tables).plus(self.demand.share(request))\n        if self.spec.admit_at",
    ),
    Patch(
        "admission forgets what may still be written",
        "demand",
        "        return request.max_num_tokens\n",
        "        return request.num_tokens\n",
    ),
    Patch(
        "what ended is still admitted with",
        "demand",
        "        self.total.add(share, -1)\n",
        "",
    ),
    Patch(
        "a tenant pays for what ended",
        "demand",
        "        tenant.add(share, -1)\n",
        "",
    ),
    Patch(
        "what open ends grow by is forgotten",
        "demand",
        "        while self._calendar and self._calendar[0][0] <= step:",
        "        while False:",
    ),
    Patch(
        "open ends are looked at a step late",
        "demand",
        "self._step + max(1, most + 1 - self.open_end_tokens",
        "self._step + max(1, most + 2 - self.open_end_tokens",
    ),
    Patch(
        "floors are counted once a request",
        "demand",
        "        self._requests[share.floor] += times\n",
        "        self._requests[share.floor] += 1\n",
    ),
    Patch(
        "a block that falls idle is not noted",
        "prefix",
        "        tables.on_lone = self._note_lone\n",
        "",
    ),
    Patch(
        "a block whose followers went is not noted",
        "prefix",
        "            if entry.parent in self._entries:\n",
        "            if False:\n",
    ),
    Patch(
        "what a failed request shared is still offered",
        "manager",
        "            self.distrust(self.tables[request.request_id])\n",
        "            pass\n",
    ),
    Patch(
        "an ended request's place in the cache is kept",
        "manager",
        "            self.prefix.forget(request.request_id)\n",
        "            pass\n",
    ),
)
