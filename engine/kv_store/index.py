"""The index of a store: where the record of each key stands. In memory alone, made anew from the segments."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.shares import TenantShares
from .record import RecordHeader, aligned, header_size


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a prefix that the store has: the blocks of ``num_tokens`` tokens, a rung and bytes for each group.

    ``parts``: (group, rung, bytes) of each block, in the order of their groups. ``segment`` and ``offset`` say where
    the record stands.
    """

    key: bytes
    segment: int
    offset: int
    num_tokens: int
    parts: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, record: RecordHeader) -> StoredPiece:
        """The place of a record."""
        parts = tuple((part.group, part.rung, part.nbytes) for part in record.parts)
        return cls(record.key, record.segment, record.offset, record.num_tokens, parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the record, its header and padding included."""
        return header_size(len(self.parts), self.num_tokens) + sum(aligned(nbytes) for _, _, nbytes in self.parts)

    @property
    def rungs(self) -> dict[int, int]:
        """The rung of each group that has a block."""
        return {group: rung for group, rung, _ in self.parts}

    def lacks(self, rungs: dict[int, int]) -> bool:
        """Whether a record of ``rungs`` would be worth more: all groups of this one, none narrower, and not the same.

        Neither is worth more where each is wider in some group; the older one stays then.
        """
        mine = self.rungs
        return rungs != mine and all(group in rungs and rungs[group] <= rung for group, rung in mine.items())


class PieceIndex:
    """Pieces by key and by segment, which of them were used, and for whom. The caller holds a lock.

    ``shares``: of tenants in the bytes of records. A record counts for the tenant that had it written, or that used it
    first since the store was opened: no name of one is on the disk.
    """

    def __init__(self, shares: TenantShares | None = None) -> None:
        self._shares = shares or TenantShares()
        self._tenants: dict[bytes, str] = {}
        self._pieces: dict[bytes, StoredPiece] = {}
        self._of_segment: dict[int, set[bytes]] = {}
        self._used: dict[bytes, int] = {}  # since their records were written: the newest segment at the last use
        self._newest = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, key: bytes) -> StoredPiece | None:
        """The piece of ``key``."""
        return self._pieces.get(key)

    def add(self, piece: StoredPiece, tenant: str | None = None) -> None:
        """Files a piece in place of an older one of its key. ``tenant``: whom it counts for, if that is known."""
        self.discard(piece.key)
        self._pieces[piece.key] = piece
        self._of_segment.setdefault(piece.segment, set()).add(piece.key)
        if tenant is not None:
            self.own(piece.key, tenant)
        self._newest = max(self._newest, piece.segment)

    def discard(self, key: bytes) -> None:
        """Forgets the piece of ``key`` if there is one."""
        self._disown(key)
        piece = self._pieces.pop(key, None)
        self._used.pop(key, None)
        if piece is not None:
            self._of_segment[piece.segment].discard(key)

    def use(self, key: bytes) -> None:
        """Notes that the piece of ``key`` is in use."""
        if key in self._pieces:
            self._used[key] = self._newest

    def own(self, key: bytes, tenant: str) -> None:
        """Has the piece of ``key`` count for ``tenant``, unless it counts for one already."""
        if self._shares.is_kept and key in self._pieces and key not in self._tenants:
            self._tenants[key] = tenant
            self._shares.add(tenant, self._pieces[key].nbytes)

    def tenant_of(self, key: bytes) -> str | None:
        """Whom the piece of ``key`` counts for, if that is known."""
        return self._tenants.get(key)

    def _disown(self, key: bytes) -> None:
        tenant = self._tenants.pop(key, None)
        if tenant is not None:
            self._shares.add(tenant, -self._pieces[key].nbytes)

    def unuse(self, key: bytes) -> None:
        """Notes that the piece of ``key`` is of no use any more."""
        self._used.pop(key, None)

    def drop_segment(self, segment: int) -> int:
        """Forgets all pieces of a segment; returns how many."""
        keys = self._of_segment.pop(segment, set())
        for key in keys:
            self._disown(key)
            del self._pieces[key]
            self._used.pop(key, None)
        return len(keys)

    def segments_over(self) -> set[int]:
        """Segments with pieces of tenants over their share."""
        over = self._shares.over
        return {self._pieces[key].segment for key, tenant in self._tenants.items() if tenant in over} if over else set()

    def handed_on(self, segment: int) -> list[StoredPiece]:
        """Pieces of a segment that are worth another record when it is given up, the first ones first.

        Those that were used; of a segment that goes for a tenant over its share all others', and none of its own.
        """
        if segment not in self.segments_over():
            return self.used_of(segment)
        used = {piece.key: None for piece in self.used_of(segment)}
        rest = sorted(self._of_segment[segment] - used.keys(), key=lambda key: self._pieces[key].offset)
        return [self._pieces[key] for key in (*used, *rest) if self._tenants.get(key) not in self._shares.over]

    def used_of(self, segment: int) -> list[StoredPiece]:
        """Pieces of a segment that were used since they were written there, the last used first.

        Those used while the same segment was the newest are in the order of their records, so that the beginning of a
        prefix comes before what follows it, which is worth nothing alone.
        """
        keys = self._of_segment.get(segment, set()) & self._used.keys()
        pieces = (self._pieces[key] for key in keys)
        return sorted(pieces, key=lambda piece: (-self._used[piece.key], piece.offset))
