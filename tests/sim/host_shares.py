"""Shares of tenants in host memory reckoned again, and who loses a copy for whom."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .broken import require

if TYPE_CHECKING:
    from .hosted import Hosted


class HostShares:
    """Checks what a tier gives up."""

    def __init__(self, hosted: Hosted):
        self._hosted, self._tier, self._oldest = hosted, hosted.tier, hosted.tier._oldest
        self._tier._oldest = self._checked_oldest

    def nbytes(self) -> Counter[str]:
        """Bytes of copies by the tenant that they count for."""
        found = Counter[str]()
        for piece in self._tier._pieces.values():
            found[piece.tenant] += sum(copy.slot.nbytes for copy in piece.held())
        return +found

    def over(self) -> set[str]:
        """The tenants that are over their share."""
        quota = self._hosted.quota
        if quota is None:
            return set()
        return {tenant for tenant, nbytes in self.nbytes().items() if nbytes > quota * self._tier.arena.nbytes}

    def _checked_oldest(self, key: bytes) -> Any:
        """What is given up for a copy of ``key``: nothing of a tenant within his share while another is over his."""
        found = self._oldest(key)
        if self._hosted.quota is None or found is None:
            return found
        require(self._tier.shares._nbytes == self.nbytes(), "bytes of host memory are miscounted by tenant")
        over, rank, pieces = self.over(), self._tier.hints.rank, self._tier._pieces
        others = [
            piece
            for piece in list(pieces.values())[: list(pieces).index(key)]
            if piece.tenant in over
            and not any(map(self._hosted.is_used, piece.held()))
            and rank(piece.key) <= rank(key)
        ]
        is_done = rank(found.key) == 0
        is_paid = found.tenant in over or not (others or pieces[key].tenant in over)
        require(is_done or is_paid, "who is within his share loses a copy")
        self._hosted.count("over" if found.tenant in over else "within")
        return found
