"""Responses that ``previous_response_id`` may name: in memory, bounded, each for its tenant alone."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

MAX_NUMBER = 8192  # responses of all tenants
OVERHEAD = 1024  # bytes that a response counts for beside its own


class StoredResponse(NamedTuple):
    """A response as its client got it, and the conversation that ended with it, both as JSON."""

    response: bytes
    messages: bytes

    @property
    def nbytes(self) -> int:
        return len(self.response) + len(self.messages) + OVERHEAD


class ResponseStore:
    """The newest responses of each tenant, at most ``max_bytes`` and ``max_number`` in all.

    The oldest ones make room, of the tenant that has most: whoever has less than its part loses none to others.
    """

    def __init__(self, max_bytes: int, max_number: int = MAX_NUMBER):
        self.max_bytes, self._max_number = max_bytes, max_number
        self._stored: dict[str, dict[str, StoredResponse]] = {}  # by tenant, the oldest first
        self._nbytes, self._numbers = Counter[str](), Counter[str]()  # by tenant

    @property
    def nbytes(self) -> int:
        return self._nbytes.total()

    def __len__(self) -> int:
        return self._numbers.total()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of ``tenant``; None where it has none of that id."""
        return self._stored.get(tenant, {}).get(response_id)

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response, unless it alone is more than may be kept."""
        if stored.nbytes > self.max_bytes:
            return
        self._stored.setdefault(tenant, {})[response_id] = stored
        self._nbytes[tenant] += stored.nbytes
        self._numbers[tenant] += 1
        while self.nbytes > self.max_bytes:
            self._drop_oldest(self._nbytes)
        while len(self) > self._max_number:
            self._drop_oldest(self._numbers)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response; False where the tenant has none of that id."""
        stored = self._stored.get(tenant, {}).pop(response_id, None)
        if stored is None:
            return False
        self._nbytes[tenant] -= stored.nbytes
        self._numbers[tenant] -= 1
        if not self._stored[tenant]:
            del self._stored[tenant], self._nbytes[tenant], self._numbers[tenant]
        return True

    def _drop_oldest(self, held: Counter[str]) -> None:
        """Forgets the oldest response of the tenant that has most of what is ``held``."""
        tenant = max(held, key=held.__getitem__)
        self.delete(tenant, next(iter(self._stored[tenant])))
