"""Bugs put into what idle cached blocks do on purpose: their order, their steps down, their leaving."""

from __future__ import annotations

from .patch import Patch

IDLE = (
    Patch(
        "idle blocks are given up before they step down",
        "pressure",
        "Pressure._yield_idle",
        "self._step_down_idle(RELIEF_BLOCKS, shortage) > 0 or self.space.evict()",
        "self.space.evict() or self._step_down_idle(RELIEF_BLOCKS, shortage) > 0",
    ),
    Patch(
        "idle blocks are never given up",
        "pressure",
        "Pressure._yield_idle",
        "self._step_down_idle(RELIEF_BLOCKS, shortage) > 0 or self.space.evict()",
        "self._step_down_idle(RELIEF_BLOCKS, shortage) > 0",
    ),
    Patch(
        "idle blocks step down one at a time",
        "pressure",
        "Pressure._yield_idle",
        "self._step_down_idle(RELIEF_BLOCKS, shortage)",
        "self._step_down_idle(1, shortage)",
    ),
    Patch(
        "as many idle blocks as may step down at once always do",
        "pressure",
        "Pressure._step_down_idle",
        "if shortage.eased(block.group, block.rung, block.rung + 1):\n    break",
        "",
    ),
    Patch(
        "an idle block goes to its floor at once",
        "pressure",
        "Pressure._step_down_idle",
        "steps.append((block, block.rung + 1))",
        "steps.append((block, block.floor))",
    ),
    Patch(
        "idle blocks yield to who cannot start",
        "pressure",
        "Pressure.stretch",
        "runs or self._could_start_without_idle(request, spare)",
        "True",
    ),
    Patch(
        "it looks ahead for all room at once",
        "pressure",
        "Pressure._look_ahead",
        "if self._step_down_idle(number, self.space.shortage_of(wanted)):\n    return",
        "if self._step_down_idle(number, self.space.shortage_of(wanted)):\n    continue",
    ),
    Patch(
        "it looks ahead with as many idle blocks as in need",
        "pressure",
        "Pressure._look_ahead",
        "self._step_down_idle(number, self.space.shortage_of(wanted))",
        "self._step_down_idle(RELIEF_BLOCKS, self.space.shortage_of(wanted))",
    ),
    Patch(
        "what is given up is not counted in",
        "shortage",
        "Shortage.without",
        "self._extra[self._tables.groups[group].sizes[rung]] -= number",
        "",
    ),
    Patch("blocks in use count as idle", "idle", "IdleBlocks.kinds", "block.refs == 1", "True"),
    Patch("bytes in use count as idle", "idle", "IdleBlocks.nbytes", "block.refs == 1", "True"),
    Patch(
        "who falls idle later is older", "idle", "IdleBlocks.fell_idle", "next(self._serials)", "-next(self._serials)"
    ),
    Patch(
        "an idle block keeps its age", "idle", "IdleBlocks.fell_idle", "next(self._serials)", "entry.since[block.group]"
    ),
    Patch(
        "a block that falls idle never steps down", "idle", "IdleBlocks.fell_idle", "self._file_step(block, since)", ""
    ),
    Patch(
        "a block that falls idle is never given up",
        "idle",
        "IdleBlocks.fell_idle",
        "self.file_exit(entry, block.group)",
        "",
    ),
    Patch("an idle block steps down once", "idle", "IdleBlocks.coldest", "self._file_step(block, since)", ""),
    Patch(
        "an idle block is offered once",
        "idle",
        "IdleBlocks.coldest",
        "for item in found:\n    heappush(self._steps, item)",
        "",
    ),
    Patch(
        "blocks in use step down as idle ones",
        "idle",
        "IdleBlocks._is_idle_since",
        "entry is not None and block.refs == 1 and entry.since[block.group] == since",
        "entry is not None and entry.since[block.group] == since",
    ),
    Patch(
        "a block is idle since it first was",
        "idle",
        "IdleBlocks._is_idle_since",
        "entry is not None and block.refs == 1 and entry.since[block.group] == since",
        "entry is not None and block.refs == 1",
    ),
    Patch(
        "an idle sink steps down",
        "idle",
        "IdleBlocks._is_idle_since",
        "0 <= block.rung < block.floor",
        "block.rung < block.floor",
    ),
    Patch(
        "idle blocks stay a rung above the last",
        "idle",
        "IdleBlocks._is_idle_since",
        "0 <= block.rung < block.floor",
        "0 <= block.rung < block.floor - 1",
    ),
    Patch(
        "blocks that others follow are given up in turn",
        "idle",
        "IdleBlocks.next_exit",
        "order == (rank, is_inner)",
        "True",
    ),
    Patch(
        "blocks are given up by an old age",
        "idle",
        "IdleBlocks.next_exit",
        "entry is not None and entry.since[index] == since and self._can_go(entry, index)",
        "entry is not None and self._can_go(entry, index)",
    ),
    Patch(
        "a narrow block is kept for good",
        "prefix",
        "_replaces",
        "filed is None or block.rung < filed.rung",
        "filed is None",
    ),
    Patch("an idle block is kept beside one as wide", "prefix", "_replaces", "filed.refs == 1", "False"),
    Patch(
        "a wide block gives way to a narrow one",
        "prefix",
        "_replaces",
        "return block.rung == filed.rung and filed.refs == 1",
        "return filed.refs == 1",
    ),
    Patch("what is replaced is leaked", "prefix", "PrefixCache._put", "self._tables.store.drop(before)", ""),
    Patch("what is replaced is still known as cached", "prefix", "PrefixCache._put", "del self._of_block[before]", ""),
    Patch("what replaces is not known as cached", "prefix", "PrefixCache._put", "self._of_block[block] = entry", ""),
    Patch(
        "steps of idle blocks count as requests'",
        "store",
        "BlockStore.demote",
        "self.num_demotions if block.holders else self.num_idle_demotions",
        "self.num_demotions",
    ),
    Patch("a hit is told as wide", "prefix", "Hit.by_rung", "max(0, block.rung)", "0"),
    Patch(
        "a hit's sink is told as a block",
        "prefix",
        "Hit.by_rung",
        "group.block_tokens if block.rung >= 0 else group.sink",
        "group.block_tokens",
    ),
)
