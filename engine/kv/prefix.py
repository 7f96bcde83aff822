"""The prefix cache: full blocks of prompts and outputs, found again by a hash of all tokens so far. No torch.

A block is keyed by SHA-256 over (salt, model, ladder) and all tokens so far; tokens are compared on a hit, so that
even a collision cannot mix requests. A cached block may step down like any other; a hit then continues on the lower
precision, unless the request's floor forbids it. What is computed again then takes the place of the narrow block.

Groups file their blocks of the same tokens together. A hit needs the blocks of all its tokens in groups that see all,
and those in sight of the next token in groups with a window, which may be given up one by one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ..request import PromptPiece, SamplingParams
from ..sizes import parse_seconds
from .block import Block
from .checkpoints import Checkpoints, StateCheckpoint
from .disk import Disk
from .hints import RETAINED_SHARE, Hints
from .hits import Hit, HitRules, piece_of
from .host_tier import HostTier
from .host_traffic import HostTraffic
from .idle import Entry, Exit, IdleBlocks
from .shares import TenantShares
from .table import BlockTables


class PrefixCache:
    """Finds, keeps and gives up shared blocks. Holds one reference on each; owned by the scheduler's thread.

    What it gives up leaves a copy in the ``host`` tier, if there is one, and that one in files, if there is a ``disk``.
    """

    def __init__(
        self,
        tables: BlockTables,
        model: str,
        host: HostTier | None = None,
        disk: Disk | None = None,
        *,
        hints: Hints | None = None,
        quota: float | None = None,
    ):
        """``hints``: of how long pieces are of use; None for new ones. ``quota``: share of a tenant in each tier."""
        self._tables = tables
        self._model = model
        self._main, self._full = tables.spec.main, tables.spec.full
        self.rules = HitRules(tables.spec)
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[Block, Entry] = {}
        self._children: dict[bytes, int] = {}
        self.hints = make_hints(tables, host) if hints is None else hints
        shares = TenantShares(None if quota is None else lambda: quota * tables.arena.goal_nbytes)
        self.idle = IdleBlocks(tables.spec, self._entries, self._children, self._of_block, self.hints, shares)
        self.checkpoints = Checkpoints(tables, self.idle.serials, self.hints)
        tables.store.on_lone = self.idle.fell_idle
        tables.store.on_change = self.idle.recount
        tables.store.host = host
        if host is not None:
            host.hints = self.hints
            if quota is not None:
                host.divide(quota)
        self.host = None if host is None else HostTraffic(self, tables, host, disk)
        self._published: dict[str, int] = {}  # request -> pieces filed
        self.reset_counters()

    def __len__(self) -> int:
        return len(self._entries)

    def reset_counters(self) -> None:
        """Counts tokens that are looked up and found anew."""
        self.num_queried_tokens = self.num_hit_tokens = 0
        self.hit_tokens: Counter[str] = Counter()  # by name of the main group's rung that they stood on
        self.checkpoints.reset_counters()

    @property
    def idle_nbytes(self) -> int:
        """Bytes that no request holds."""
        return self.idle.nbytes + self.checkpoints.nbytes

    def idle_kinds(self) -> Counter[tuple[int, int]]:
        """Numbers by group and rung of the blocks, and of the slots of checkpoints, that ``evict`` can give up."""
        return self.idle.kinds() + self.checkpoints.kinds()

    # ---- finding

    def lookup(
        self,
        tokens: list[int],
        salt: str,
        floor: int,
        limit: int,
        known: list[PromptPiece] | None = None,
        *,
        is_exact: bool = False,
    ) -> Hit:
        """The longest cached prefix of ``tokens`` within its first ``limit`` that all groups can serve.

        Blocks that are counted as dense for a request of ``tokens`` must still be dense. With states a checkpoint must
        stand behind it, too. One that ``is_exact`` stands on the rungs on which the request's own blocks would, and
        stays there whatever other requests do.
        """
        self.num_queried_tokens += limit
        if self.checkpoints.is_needed:
            return self._lookup_with_states(tokens, salt, floor, limit, known)
        pieces = (self.cached(key, piece) for key, _, piece in self.pieces(tokens, salt, limit, known))
        found = self.rules.longest(pieces, len(tokens), floor)
        return self._take(found[: self.rules.num_exact(found, floor)] if is_exact else found)

    def _lookup_with_states(
        self, tokens: list[int], salt: str, floor: int, limit: int, known: list[PromptPiece] | None
    ) -> Hit:
        pieces = [(key, self.cached(key, piece)) for key, _, piece in self.pieces(tokens, salt, limit, known)]
        has_states = [True, *(self.checkpoints.serves(key, floor) for key, _ in pieces)]  # for each number of pieces
        found = self.rules.longest((blocks for _, blocks in pieces), len(tokens), floor)
        num_cached = piece_of(self._main, len(found) - 1).stop if found else 0
        while not has_states[len(found)]:
            number = next(n for n in range(len(found), -1, -1) if has_states[n])
            found = self.rules.longest(found[:number], len(tokens), floor)
        checkpoint = self.checkpoints[pieces[len(found) - 1][0]] if found else None
        return self._take(found)._replace(checkpoint=checkpoint, num_cached=num_cached)

    def pieces(
        self, tokens: list[int], salt: str, limit: int, known: list[PromptPiece] | None = None
    ) -> list[PromptPiece]:
        """The pieces within the first ``limit`` of ``tokens``.

        ``known``: the first ones of these tokens, as found before; new ones are added.
        """
        known = [] if known is None else known
        number, key = self._num_pieces(limit), known[-1].key if known else self._root(salt)
        for index in range(len(known), number):
            piece = array("q", tokens[piece_of(self._main, index)])
            parent, key = key, _extend(key, piece)
            known.append(PromptPiece(key, parent, piece))
        return known[:number]

    def cached(self, key: bytes, piece: array[int]) -> Sequence[Block | None]:
        """The cached blocks of a piece, by group."""
        entry = self._entries.get(key)
        if entry is None or entry.tokens != piece:
            return (None,) * len(self._tables.groups)
        return entry.blocks

    def _take(self, found: Sequence[Sequence[Block | None]]) -> Hit:
        """The hit of these pieces."""
        if not found:
            return Hit()
        num_tokens = piece_of(self._main, len(found) - 1).stop
        self.num_hit_tokens += num_tokens
        blocks = [
            found[piece][group] for group, pieces in enumerate(self.rules.in_sight(len(found))) for piece in pieces
        ]
        hit = Hit(num_tokens, [block for block in blocks if block is not None])
        self.hit_tokens.update(hit.by_rung(self._tables.spec.main, self._tables.main.index))
        return hit

    # ---- filing

    def publish(
        self,
        request_id: str,
        tokens: list[int],
        salt: str,
        num_computed: int,
        tenant: str = "",
        known: list[PromptPiece] | None = None,
    ) -> None:
        """Files the blocks of a request of ``tenant`` that are full and computed and not filed yet."""
        filed = self._published.get(request_id, 0)
        for index, (key, parent, piece) in enumerate(self.pieces(tokens, salt, num_computed, known)[filed:], filed):
            blocks = [group.piece(request_id, index) for group in self._tables.groups]
            self.file(key, parent, piece, blocks, tenant)
            self._published[request_id] = index + 1

    def file(
        self, key: bytes, parent: bytes, tokens: array[int], blocks: Sequence[Block | None], tenant: str = ""
    ) -> None:
        """Files blocks of one piece, where they are worth more than those that are filed for it; None: given back.

        ``tenant``: whose share they count in, if none are filed.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.tokens != tokens:
            return
        filed = (None,) * len(blocks) if entry is None else entry.blocks
        pairs = zip(blocks, filed, strict=True)
        better = [block for block, old in pairs if block is not None and _replaces(block, old)]
        if not better:
            return
        if entry is None:
            entry = self._entries[key] = Entry(key, [None] * len(blocks), tokens, parent, [0] * len(blocks), tenant)
            self._children[parent] = self._children.get(parent, 0) + 1
        for block in better:
            self._put(entry, block)
        self.idle.count(entry)
        if self.host is not None:
            self.host.filed(key)

    def _put(self, entry: Entry, block: Block) -> None:
        """Files ``block`` in its group; the cache lets go of the one before it."""
        before, entry.blocks[block.group] = entry.blocks[block.group], block
        self._of_block[block] = entry
        block.refs += 1
        if before is not None:
            del self._of_block[before]
            self._tables.store.drop(before)

    def entry(self, key: bytes) -> Entry | None:
        """The entry of that key."""
        return self._entries.get(key)

    def entry_of(self, block: Block) -> Entry | None:
        """The entry in which ``block`` is filed."""
        return self._of_block.get(block)

    def next_end(self, num_computed: int) -> int:
        """Token count at which one more block is full than at ``num_computed``."""
        end: int = piece_of(self._main, self._num_pieces(num_computed)).stop
        return end

    def key_at(self, tokens: list[int], salt: str, num_tokens: int, known: list[PromptPiece]) -> bytes:
        """The key of the pieces within the first ``num_tokens``, filed or not; arguments as in ``pieces``."""
        found = self.pieces(tokens, salt, num_tokens, known)
        return found[-1].key if found else self._root(salt)

    # ---- hints

    def note_hints(self, tokens: list[int], params: SamplingParams) -> None:
        """Notes the hints of a request with these computed ``tokens``, before its blocks are taken back."""
        keys = [key for key, _, _ in self.pieces(tokens, params.cache_salt, len(tokens)) if key in self._entries]
        nbytes = sum(group.widest.nbytes for group in self._tables.spec.groups)
        self.hints.note(keys, nbytes, params.tenant, params.session, parse_seconds(params.retain))

    def done(self, tenant: str, session: str) -> int:
        """Has the pieces of a session, which no other one has, make room first; returns their number."""
        keys = self.hints.done(tenant, session)
        self._refile(keys)
        if self.host is not None and self.host.disk is not None:
            for key in keys:
                self.host.disk.disk.let_age(key)
        return len(keys)

    def expire(self) -> None:
        """Ends the lives of retained pieces whose time is over."""
        self._refile(self.hints.expire())

    def _refile(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            entry = self._entries.get(key)
            for index in () if entry is None else range(len(entry.blocks)):
                assert entry is not None
                self.idle.file_exit(entry, index)

    def forget(self, request_id: str) -> None:
        """Drops the record of a request that gives its blocks back; the blocks that it filed stay."""
        self._published.pop(request_id, None)
        self.checkpoints.end(request_id, self._entries)

    # ---- stepping down and giving up

    def coldest(self, number: int) -> list[Block]:
        """The first ``number`` idle blocks, and slots of checkpoints, to step down, the widest first.

        Of equal ones the least recently used.
        """
        found = self.idle.coldest(number) + self.checkpoints.coldest(number)
        return [block for *_, block in sorted(found, key=lambda each: each[:2])[:number]]

    def evict(self) -> bool:
        """Gives up what was used least recently and no request holds: a checkpoint, a block in a window, or all blocks
        of the same tokens; one whose neighbour in another group is in use goes alone.

        Of the latter preferably those that no cached block follows.
        """
        found, checkpoint = self.idle.next_exit(), self.checkpoints.oldest()
        if checkpoint is not None and (found is None or self._precedes(checkpoint, found)):
            self.checkpoints.remove(checkpoint)
            return True
        if found is not None:
            entry, part = found.entry, found.part
            if self.host is not None:
                self.host.move_out(entry, entry.blocks if part is None else [entry.blocks[part]])
            if part is None:
                self._remove(entry)
            else:
                self._remove_part(entry, part)
        return found is not None

    def _precedes(self, checkpoint: StateCheckpoint, found: Exit) -> bool:
        """Whether a checkpoint makes room before what is ``found`` of the blocks: nothing follows it."""
        order = self.hints.rank(checkpoint.key), False, checkpoint.since
        return not found.is_over and order < (*found.order, found.since)

    def purge(self, blocks: Collection[Block]) -> None:
        """Takes out entries of blocks whose values are not trusted, and copies of them."""
        entries = list({self._of_block[block]: None for block in blocks if block in self._of_block})
        if any(block not in self._of_block and not block.holders for block in blocks):
            self.checkpoints.clear()  # whoever held it has left states of it behind blocks of others, perhaps
        elif entries:
            self._lose_checkpoints_behind({entry.key for entry in entries})
        for entry in entries:
            self._remove(entry)
        if self.host is not None:
            self.host.purge(blocks, entries)

    def _lose_checkpoints_behind(self, bad: Collection[bytes]) -> None:
        """Takes out the checkpoints at the entries of these keys, and of all tokens that follow theirs."""
        for key in list(self.checkpoints):
            at = key
            while at not in bad and at in self._entries:
                at = self._entries[at].parent
            if at in bad:
                self.checkpoints.lose(key)

    def clear(self) -> None:
        """Gives up everything; blocks that requests share stay theirs."""
        self.checkpoints.clear()
        for block in self._of_block:
            self._tables.store.drop(block)
        if self.host is not None:
            self.host.clear()
        for book in (self._entries, self._of_block, self._children, self.idle, self._published):
            book.clear()

    def _remove(self, entry: Entry) -> None:
        """Takes an entry out, all blocks that it has, and its checkpoint."""
        del self._entries[entry.key]
        self.idle.uncount(entry)
        self.checkpoints.lose(entry.key)
        if self.host is None:
            self.hints.forget(entry.key)
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            for index in self._full if entry.parent in self._entries else ():
                self.idle.file_exit(self._entries[entry.parent], index)
        for block in entry.blocks:
            if block is not None:
                del self._of_block[block]
                self._tables.store.drop(block)

    def _remove_part(self, entry: Entry, index: int) -> None:
        """Gives up the block of one group alone, and the entry if it was the last one."""
        block = entry.blocks[index]
        assert block is not None
        del self._of_block[block]
        entry.blocks[index] = None
        self.idle.count(entry)
        self._tables.store.drop(block)
        if not any(entry.blocks):
            self._remove(entry)

    # ---- pieces

    def _root(self, salt: str) -> bytes:
        spec = self._tables.spec
        return hashlib.sha256(repr((salt, self._model, spec.name, spec.main.slots)).encode()).digest()

    def _num_pieces(self, num_tokens: int) -> int:
        """Number of pieces within ``num_tokens``, the request's slot and full blocks."""
        group, in_blocks = self._main, self._main.in_blocks(num_tokens)
        return group.num_token_slots + in_blocks // group.block_tokens if in_blocks >= 0 else 0


def make_hints(tables: BlockTables, host: HostTier | None, quota: float | None = None) -> Hints:
    """Hints for pieces in the memory of ``tables`` and of ``host``, of which a tenant may use the share ``quota``."""
    nbytes = min(tables.arena.nbytes, tables.arena.nbytes if host is None else host.arena.nbytes)
    return Hints(int(RETAINED_SHARE * nbytes), int(min(RETAINED_SHARE, quota or 1.0) * nbytes))


def _replaces(block: Block, filed: Block | None) -> bool:
    """Whether a request's ``block`` takes the place of the one that is ``filed`` for the same tokens.

    A wider one does; so does one that is as wide as an idle one, which would be kept beside it for nothing.
    """
    if filed is None or block.rung < filed.rung:
        return True
    return block.rung == filed.rung and filed.refs == 1


def _extend(key: bytes, tokens: array[int]) -> bytes:
    return hashlib.sha256(key + tokens.tobytes()).digest()
