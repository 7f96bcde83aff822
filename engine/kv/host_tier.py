"""The host tier: copies of cached blocks in the memory of the host, at the bits that they had. Books only, no torch.

Copies of the same tokens make a piece, as entries of the prefix cache do. Pieces are kept in the order of their use,
and each is older than the one whose tokens come before its own: where room lacks the end of a prefix leaves before its
beginning. Slots that a command names stay as they are until the step after it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from math import lcm

from .arena import Arena, Slot
from .block import Block
from .hints import RETAINED, Hints
from .host_piece import Copies, Fetch, HostBlock, HostPiece, HostStats
from .moves import HostCopy
from .shares import TenantShares
from .spec import KVSpec


class HostTier:
    """Keeps copies in ``nbytes`` of host memory, in slabs of ``slab_nbytes`` as in KV memory.

    With several ranks ``nbytes`` are those of each, and addresses are equal.
    """

    def __init__(self, spec: KVSpec, nbytes: int, slab_nbytes: int):
        align = lcm(*(group.align for group in spec.groups))
        self.spec = spec
        self.arena = Arena(nbytes - nbytes % align, slab_nbytes, block_nbytes=spec.main.widest.nbytes)
        self.hints = Hints(0, 0)  # of how long pieces are of use, those of the prefix cache
        self.shares = TenantShares()
        self.num_commands = 0  # that were taken
        self.num_ended = 0  # leading ones of them whose copies are known to be over
        self.unsaved: dict[bytes, None] | None = None  # keys of pieces with new copies, if anybody asks
        self._main = spec.groups.index(spec.main)
        self._pieces: OrderedDict[bytes, HostPiece] = OrderedDict()  # by key, the least recently used first
        self._num_copies = 0  # of all pieces
        self._unsure: dict[HostBlock, HostPiece] = {}  # copies whose sources are remembered
        self._gone: dict[Block, tuple[bytes, int]] = {}  # blocks given up: their keys, by commands that have not ended
        self._busy: dict[Slot, int] = {}  # slots in copies that may be under way, with the number of their command
        self._held: set[Slot] = set()  # slots that the disk reads or writes
        self._coming: dict[bytes, HostPiece] = {}  # pieces that the disk is to bring, by key
        self._leaving: list[Slot] = []  # busy or held ones that are to be freed
        self._outs: dict[int, list[HostCopy]] = {}
        self._writes: dict[HostBlock, HostPiece] = {}  # noted, and not taken yet
        self._fetches: dict[HostBlock, Fetch] = {}  # that have not landed
        self.reset_counters()

    def divide(self, quota: float) -> None:
        """Gives each tenant that share; the pieces of those over theirs are given up first."""
        self.shares = TenantShares(lambda: quota * self.arena.nbytes)

    def reset_counters(self) -> None:
        """Counts bytes and tokens anew."""
        self._moved: Counter[str] = Counter()  # bytes by what became of them
        self._fetched_tokens: Counter[str] = Counter()

    def stats(self) -> HostStats:
        """Bytes in use, and what has moved since the counters were reset."""
        moved, arena = self._moved, self.arena
        return HostStats(
            arena.nbytes, arena.used_nbytes, self._num_copies, moved["out"], moved["written"], moved["fetched"],
            moved["dropped"], dict(self._fetched_tokens),
        )  # fmt: skip

    # ---- finding

    def find(self, key: bytes, tokens: array[int]) -> HostPiece | None:
        """The piece of that key, if it is of the same tokens."""
        piece = self._pieces.get(key)
        return None if piece is None or piece.tokens != tokens else piece

    def keeps(self, key: bytes, group: int, rung: int) -> bool:
        """Whether a copy is kept, or under way, that is as wide as ``rung`` or wider."""
        piece = self._pieces.get(key)
        copy = None if piece is None else piece.blocks[group]
        return copy is not None and copy.rung <= rung

    def piece(self, key: bytes) -> HostPiece | None:
        """The piece of that key."""
        return self._pieces.get(key)

    def is_coming(self, copy: HostBlock) -> bool:
        """Whether a block is filled from ``copy`` that has not landed."""
        return copy in self._fetches

    def is_there(self, copy: HostBlock) -> bool:
        """Whether the bytes of ``copy`` lie in host memory for anybody to read, and are known to be good."""
        return copy.source is None and copy.command <= self.num_ended

    def touch(self, keys: Collection[bytes]) -> None:
        """Notes that the pieces of these keys, in the order of their tokens, are used, and all before each of them."""
        touched = set[bytes]()
        for key in reversed(list(keys)):
            while key not in touched and (piece := self._pieces.get(key)) is not None:
                self._pieces.move_to_end(key)
                touched.add(key)
                key = piece.parent

    # ---- copies

    def move_out(
        self, key: bytes, parent: bytes, tokens: array[int], block: Block, num_waves: int, tenant: str = ""
    ) -> bool:
        """Has ``block`` copied out behind so many waves of the next command, unless a copy as wide is kept.

        Returns whether there is such a copy now.
        """
        self._gone[block] = key, self.num_commands + 1
        piece = self._pieces.get(key)
        copy = None if piece is None or piece.tokens != tokens else piece.blocks[block.group]
        if piece is not None and copy is not None and copy in self._writes and copy.rung != block.rung:
            self._remove(piece, copy)  # the block stepped down since
            copy = None
        if copy is None or copy.rung > block.rung:
            copy = self._keep(key, parent, tokens, block, tenant)
            if copy is None:
                return False
        elif self._writes.pop(copy, None) is None:
            return True
        copy.source = block
        self._note(self._outs.setdefault(num_waves, []), block, copy)
        return True

    def write(self, key: bytes, parent: bytes, tokens: array[int], block: Block, tenant: str = "") -> int:
        """Has ``block`` copied beside the next step; returns its bytes, 0 if they find no room."""
        copy = self._keep(key, parent, tokens, block, tenant)
        if copy is None:
            return 0
        self._writes[copy] = self._pieces[key]
        return copy.slot.nbytes

    def fetch(self, piece: HostPiece, copy: HostBlock, block: Block) -> None:
        """Has ``block`` filled with the bytes of ``copy`` beside the next step."""
        self._busy[copy.slot] = self.num_commands + 1
        self._fetches[copy] = Fetch(block, piece, copy, self.num_commands + 1)

    def is_kept(self, piece: HostPiece, copy: HostBlock) -> bool:
        """Whether a copy of ``piece`` was not given up, nor taken out, since it was found."""
        return self._pieces.get(piece.key) is piece and piece.blocks[copy.group] is copy

    @property
    def has_copies(self) -> bool:
        """Whether copies are noted for the next command."""
        return bool(self._outs or self._writes) or any(f.command > self.num_commands for f in self._fetches.values())

    def take(self) -> Copies:
        """The copies noted since the last call, which the next command carries out."""
        command = self.num_commands + 1
        outs, self._outs = self._outs, {}
        written, fetched = list[HostCopy](), list[HostCopy]()
        for copy, piece in list(self._writes.items()):
            source = copy.source
            if source is not None and source.slot.alive and source.rung == copy.rung:
                self._note(written, source, copy)
            else:
                self._remove(piece, copy)
        self._writes.clear()
        for fetch in self._fetches.values():
            if fetch.command == command:
                self._note(fetched, fetch.block, fetch.copy)
                self._count_fetch(fetch.block)
        self.num_commands = command
        self._moved["out"] += sum(copy.nbytes for copies in outs.values() for copy in copies)
        self._moved["written"] += sum(copy.nbytes for copy in written)
        self._moved["fetched"] += sum(copy.nbytes for copy in fetched)
        return Copies(outs, written, fetched)

    def begin_step(self) -> list[Fetch]:
        """Frees the slots of commands that were taken; returns the fetches that have landed with them."""
        self._busy = {slot: command for slot, command in self._busy.items() if command > self.num_commands}
        leaving, self._leaving = self._leaving, []
        for slot in leaving:
            self._release(slot)
        landed = [fetch for fetch in self._fetches.values() if fetch.command <= self.num_commands]
        for fetch in landed:
            del self._fetches[fetch.copy]
        return landed

    def confirm(self, command: int) -> None:
        """Notes that commands up to this one have ended, and that all of their bad values are known."""
        self._gone = {block: left for block, left in self._gone.items() if left[1] > command}
        for copy in [copy for copy in self._unsure if copy.command <= command]:
            del self._unsure[copy]
            copy.source = None

    def ended(self, command: int) -> None:
        """Notes that all copies of commands up to this one are over."""
        self.num_ended = max(self.num_ended, command)

    # ---- the disk

    def hold(self, slots: Iterable[Slot]) -> None:
        """Keeps ``slots`` for the disk, which reads them, until ``let_go``."""
        self._held.update(slots)

    def let_go(self, slots: Iterable[Slot]) -> None:
        """Notes that the disk is done with ``slots``."""
        self._held.difference_update(slots)

    def coming(self, key: bytes) -> HostPiece | None:
        """The piece of that key that the disk is to bring."""
        return self._coming.get(key)

    def receive(
        self, key: bytes, parent: bytes, tokens: array[int], rungs: Mapping[int, int], tenant: str = ""
    ) -> HostPiece | None:
        """Places for copies of a piece on these rungs by group, which the disk is to bring; None: there is no room.

        Nobody finds them before ``land``. Copies of earlier commands may be under way there until those have ended.
        """
        own = self._pieces.get(key)
        if own is None:
            self._pieces[key] = self._piece(key, parent, tokens, tenant)
        elif own.tokens != tokens:
            return None
        self.touch([key])
        found = self._piece(key, parent, tokens, tenant)
        for group, rung in rungs.items():
            slot = self._allocate(self.spec.groups[group].nbytes(rung), key)
            if slot is None:
                break
            found.blocks[group] = HostBlock(slot, group, rung, 0, None)
        if own is None:
            del self._pieces[key]
        if sum(1 for _ in found.held()) < len(rungs):
            for copy in found.held():
                self.arena.release(copy.slot)
            return None
        self.hold(copy.slot for copy in found.held())
        self._coming[key] = found
        return found

    def land(self, coming: HostPiece, is_good: bool) -> bool:
        """Files what the disk brought, where it is worth more than what is kept; whether anybody still asks for it."""
        key = coming.key
        self.let_go(copy.slot for copy in coming.held())
        is_asked = self._coming.get(key) is coming
        if is_asked:
            del self._coming[key]
        own = self._pieces.get(key)
        if not (is_asked and is_good) or (own is not None and own.tokens != coming.tokens):
            for copy in coming.held():
                self._release(copy.slot)
            return is_asked and is_good
        if own is None:
            own = self._pieces[key] = self._piece(key, coming.parent, coming.tokens, coming.tenant)
        self.touch([key])
        for copy in coming.held():
            before = own.blocks[copy.group]
            if before is not None and before.rung <= copy.rung:
                self._release(copy.slot)
                continue
            self._put(own, copy)
        return True

    # ---- taking out

    def distrust(self, blocks: Collection[Block]) -> list[bytes]:
        """Takes out the copies of ``blocks``, whose values turned out bad, as far as their sources are remembered.

        Returns the keys of those that were given up in the command that found them bad: an earlier, wider copy of one
        may be kept.
        """
        for copy, piece in [each for each in self._unsure.items() if each[0].source in blocks]:
            self._remove(piece, copy)
        return [self._gone[block][0] for block in blocks if block in self._gone]

    def purge(self, key: bytes) -> None:
        """Takes out the piece of that key, and does not take it from the disk."""
        self._coming.pop(key, None)
        piece = self._pieces.get(key)
        if piece is not None:
            self._remove_all(piece)

    def clear(self) -> list[Block]:
        """Takes out everything; returns the blocks for which bytes were on their way."""
        for piece in list(self._pieces.values()):
            self._remove_all(piece)
        self._coming.clear()
        self._gone.clear()
        fetches, self._fetches = self._fetches, {}
        return [fetch.block for fetch in fetches.values()]

    # ---- room

    def _piece(self, key: bytes, parent: bytes, tokens: array[int], tenant: str) -> HostPiece:
        return HostPiece(key, parent, tokens, [None] * len(self.spec.groups), tenant)

    def _keep(self, key: bytes, parent: bytes, tokens: array[int], block: Block, tenant: str) -> HostBlock | None:
        """A place for a copy of ``block``, instead of a narrower one; None if it would be the first to be given up."""
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = self._piece(key, parent, tokens, tenant)
        elif piece.tokens != tokens:
            return None
        self.touch([key])
        slot = self._allocate(block.slot.nbytes, key)
        if slot is not None:
            copy = HostBlock(slot, block.group, block.rung, self.num_commands + 1, block)
            self._put(piece, copy)
            self._unsure[copy] = piece
            if self.unsaved is not None:
                self.unsaved.pop(key, None)
                self.unsaved[key] = None
            return copy
        if not any(piece.blocks):
            del self._pieces[key]
        return None

    def _put(self, piece: HostPiece, copy: HostBlock) -> None:
        """Adds a copy to its piece, in place of the one before."""
        before, piece.blocks[copy.group] = piece.blocks[copy.group], copy
        self._num_copies += 1
        self.shares.add(piece.tenant, copy.slot.nbytes)
        if before is not None:
            self._forget(piece, before)

    def _allocate(self, nbytes: int, key: bytes) -> Slot | None:
        """A slot, for which pieces are given up that were used before that of ``key``."""
        while (slot := self.arena.allocate(nbytes)) is None:
            oldest = self._oldest(key)
            if oldest is None:
                return None
            self._moved["dropped"] += sum(copy.slot.nbytes for copy in oldest.held())
            self._remove_all(oldest)
        return slot

    def _oldest(self, key: bytes) -> HostPiece | None:
        """The piece that is given up next of those that can be at once, if it comes before that of ``key``.

        One that is done, or else the least recently used one; retained ones come last. Those of tenants over their
        share come before all others, which yield to none of these.
        """
        for done in self.hints.done_keys():
            piece = self._pieces.get(done)
            if piece is not None and done != key and not any(map(self._is_used, piece.held())):
                return piece
        over = self.shares.over
        found = self._oldest_of(over, key) if over else None
        return self._oldest_of(None, key) if found is None and self._pieces[key].tenant not in over else found

    def _oldest_of(self, tenants: Collection[str] | None, key: bytes) -> HostPiece | None:
        """The same among the pieces of some ``tenants``, None for all."""
        retained = None
        for piece in self._pieces.values():
            if piece.key == key:
                break
            if any(map(self._is_used, piece.held())) or (tenants is not None and piece.tenant not in tenants):
                continue
            if self.hints.rank(piece.key) != RETAINED:
                return piece
            retained = retained or piece
        return retained if self.hints.rank(key) == RETAINED else None

    def _is_used(self, copy: HostBlock) -> bool:
        """Whether a command, the next one included, or the disk reads or writes ``copy``."""
        return copy.slot in self._busy or copy.slot in self._held or copy in self._writes

    def _remove_all(self, piece: HostPiece) -> None:
        for copy in list(piece.held()):
            self._remove(piece, copy)

    def _remove(self, piece: HostPiece, copy: HostBlock) -> None:
        """Takes a copy out, and its piece if it was the last."""
        piece.blocks[copy.group] = None
        self._forget(piece, copy)
        if not any(piece.blocks):
            del self._pieces[piece.key]

    def _forget(self, piece: HostPiece, copy: HostBlock) -> None:
        """Frees the slot of a copy, no part of ``piece`` any more, as soon as no command and no disk needs it."""
        self.shares.add(piece.tenant, -copy.slot.nbytes)
        self._num_copies -= 1
        self._unsure.pop(copy, None)
        self._writes.pop(copy, None)
        self._release(copy.slot)

    def _release(self, slot: Slot) -> None:
        if slot in self._busy or slot in self._held:
            self._leaving.append(slot)
        else:
            self.arena.release(slot)

    def _note(self, copies: list[HostCopy], block: Block, copy: HostBlock) -> None:
        """Notes a copy of the next command between a block and its ``copy``."""
        copy_nbytes = copy.slot.nbytes
        self._busy[copy.slot] = self.num_commands + 1
        copies.append(HostCopy(block.slot.address, copy.slot.address, copy_nbytes))

    def _count_fetch(self, block: Block) -> None:
        if block.group == self._main:
            group = self.spec.main
            name = group.rungs[max(0, block.rung)].name
            self._fetched_tokens[name] += group.block_tokens if block.rung >= 0 else group.sink
