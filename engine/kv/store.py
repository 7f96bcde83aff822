"""The slots of all groups' blocks: handed out, moved in waves, taken back. No torch.

Books only: changes of bytes are noted as waves of moves, which the cache carries out before the next step. Within a
wave no slot is both read and written, except banks, which are mined before anything is moved; a slot that a wave frees
may be written by the next. Where the arena's hole moves, its new place is noted between the waves that left it and the
first that writes where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .arena import Arena, ArenaError, Slot
from .bank import Bank
from .block import Block, Move

if TYPE_CHECKING:
    from .group import GroupTables
    from .host_tier import HostTier


class BlockStore:
    """Gives blocks slots of the arena, lets blocks step down, takes slots back. ``groups``: those of the blocks."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.groups: tuple[GroupTables, ...] = ()
        self.waves: list[list[Move]] = []
        self.holes: dict[int, tuple[int, int]] = {}  # addresses of the arena's hole, by the number of waves before
        self.on_lone: Callable[[Block], None] | None = None  # called with each block left with one owner
        self.on_change: Callable[[Block], None] | None = None  # with each such block that steps down or gets another
        self.host: HostTier | None = None  # whose copies go with the moves
        self.num_demotions: Counter[tuple[str, str]] = Counter()  # of requests' blocks, by names of rungs
        self.num_idle_demotions: Counter[tuple[str, str]] = Counter()  # of blocks that no request holds
        self._owner: dict[Slot, Block] = {}
        self._fresh: dict[Slot, None] = {}
        self._retiring: list[Slot] = []  # old slots of the wave in progress
        self._hole = (0, 0)  # noted last

    def live_blocks(self) -> list[Block]:
        """Every block that owns a slot."""
        return list(self._owner.values())

    def newest_blocks(self) -> Iterator[Block]:
        """Every block that owns a slot, those that got it last first."""
        return reversed(self._owner.values())

    def new_block(self, group: GroupTables, rung: int, floor: int, bank: Bank | None = None) -> Block:
        """A block of ``group`` with one owner, a request of that ``floor``. Raises ``ArenaError`` without room."""
        return self._make(group, rung, floor, (floor,), bank)

    def new_idle_block(self, group: GroupTables, rung: int) -> Block:
        """A block of ``group`` whose owner is no request. Raises ``ArenaError`` without room."""
        return self._make(group, rung, group.spec.narrowest(rung), ())

    def _make(
        self, group: GroupTables, rung: int, floor: int, holders: tuple[int, ...], bank: Bank | None = None
    ) -> Block:
        size = group.sizes[rung]
        slot = self.arena.allocate(size)
        while slot is None:
            if not self._evacuate():
                raise ArenaError("the arena has less room than it says")
            slot = self.arena.allocate(size)
        block = self._owner[slot] = Block(slot, group.index, rung, floor, group.number(), holders=holders, bank=bank)
        self._fresh[slot] = None
        self.note_hole()
        group.made(block)
        return block

    def share(self, block: Block) -> None:
        """Gives ``block`` one owner more."""
        block.refs += 1
        if block.refs == 2 and self.on_change is not None:
            self.on_change(block)

    def drop(self, block: Block) -> None:
        """Takes one owner from ``block``; without owners it is freed. Raises ``ArenaError`` for a dead block."""
        if block.refs < 1:
            raise ArenaError("a block was dropped more often than it was shared")
        block.refs -= 1
        if block.refs == 1 and self.on_lone is not None:
            self.on_lone(block)
        if not block.refs:
            self.groups[block.group].freed(block)
            del self._owner[block.slot]
            self._fresh.pop(block.slot, None)
            self.arena.release(block.slot)

    def take_fresh(self) -> list[Slot]:
        """Slots handed out since the last call and not written yet; they hold an earlier owner's bytes."""
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    def demote(self, steps: Iterable[tuple[Block, int]]) -> int:
        """Lets each block step down to its rung, in one wave if there is room; returns how many did.

        A block whose rung has no slot goes to the next one that has, at most to its floor, or stays where it is. A
        state is a block here; the bytes of one that nobody has written yet are not moved.
        """
        wave, done = list[Move](), 0
        for block, wanted in steps:
            group = self.groups[block.group]
            for rung in range(wanted, block.floor + 1):
                slot = self._urgent_slot(group.sizes[rung], wave)
                if slot is not None:
                    break
            else:
                continue
            if block.rung < 0 and block.slot in self._fresh:
                del self._fresh[block.slot]
                self._fresh[slot] = None
            else:
                wave.append(Move.down(block, slot, rung))
            old = block.rung
            demotions = self.num_demotions if block.holders else self.num_idle_demotions
            demotions[group.spec.name_of(old), group.spec.name_of(rung)] += 1
            # The old slot stays allocated until the wave ends, so that nothing in the wave is written over it.
            self._owner.pop(block.slot)
            self._retiring.append(block.slot)
            self._owner[slot] = block
            block.slot, block.rung = slot, rung
            group.stepped_down(block, old)
            if block.refs == 1 and self.on_change is not None:
                self.on_change(block)
            done += 1
        self._end_wave(wave)
        return done

    def copy(self, sources: Sequence[Block], targets: Sequence[Block]) -> None:
        """Has the bytes of each of ``sources`` copied to its target, of equal size or on a narrower rung, in a wave."""
        for block in targets:
            self._fresh.pop(block.slot, None)  # they are written in full
        pairs = zip(sources, targets, strict=True)
        self._end_wave([Move(b, a.slot.address, b.slot.address, a.rung, b.rung) for a, b in pairs])

    def resize(self, nbytes: int) -> None:
        """Has at most ``nbytes`` of memory held: more at once, less as far as ``shrink`` takes it."""
        self.arena.resize(nbytes)
        self.note_hole()

    def shrink(self) -> int:
        """Takes free bytes towards the arena's goal, and gathers some; returns the bytes that it lacks."""
        lacks = self.arena.shrink()
        if not lacks and self.arena.is_shrinking and self._evacuate():
            lacks = self.arena.shrink()
        self.note_hole()
        return lacks

    def note_hole(self, always: bool = False) -> None:
        """Notes where the arena's hole is if it has moved, or ``always``, as the wave in progress finds it."""
        if always or self.arena.hole.span != self._hole:
            self._hole = self.holes[len(self.waves)] = self.arena.hole.span

    def check_integrity(self) -> None:
        """Raises ``ArenaError`` unless tables, blocks and arena agree."""
        self.arena.check_integrity()
        for slot, block in self._owner.items():
            if block.slot is not slot or not slot.alive:
                raise ArenaError(f"block on rung {block.rung} does not own its slot")
        if sum(self.arena.live.values()) != len(self._owner):
            raise ArenaError("a live slot belongs to no block")
        for group in self.groups:
            group.check_integrity([block for block in self._owner.values() if block.group == group.index])

    def _urgent_slot(self, nbytes: int, wave: list[Move]) -> Slot | None:
        """A slot for a block that steps down; ends the ``wave`` and gathers free bytes if need be."""
        slot = self.arena.allocate(nbytes, urgent=True)
        if slot is None:
            self._end_wave(wave)
            slot = self.arena.allocate(nbytes, urgent=True)
        while slot is None and self._evacuate():
            slot = self.arena.allocate(nbytes, urgent=True)
        return slot

    def _evacuate(self) -> bool:
        """Gathers free bytes of the arena, as a wave of copies; ``False`` if none can be won."""
        moves, wave = self.arena.evacuate(), []
        for old, new in moves:
            block = self._owner.pop(old)
            self._owner[new] = block
            block.slot = new
            self.groups[block.group].note(block)
            if old in self._fresh:
                del self._fresh[old]
                self._fresh[new] = None
            else:
                wave.append(Move(block, old.address, new.address, block.rung, block.rung))
            self._retiring.append(old)
        self._end_wave(wave)
        return bool(moves)

    def _end_wave(self, wave: list[Move]) -> None:
        """Notes the moves of ``wave``, empties it, and frees the slots that the moves leave."""
        self.note_hole()
        if wave:
            self.waves.append(wave[:])
            wave.clear()
        for slot in self._retiring:
            self.arena.release(slot)
        self._retiring.clear()
