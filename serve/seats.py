"""Seats: how many completions may run and wait at once, shared between tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError

RETRY_AFTER = 1  # seconds after which a refused client may try again


class Seats:
    """Completions that have not ended, and requests whose bodies are read, at most ``most``.

    Where several tenants share them, none may hold more than it leaves free: one alone gets half, k of them a part in
    k + 1 each, and whoever comes next finds some.
    """

    def __init__(self, most: int, *, is_shared: bool):
        self._most, self._is_shared = most, is_shared
        self._taken: Counter[str] = Counter()  # by tenant

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    def take(self, tenant: str, number: int = 1) -> None:
        """Takes seats. Raises ``ApiError`` where there are fewer, now or ever."""
        at_most = max(1, self._most // 2) if self._is_shared else self._most
        if number > at_most:
            raise ApiError(400, f"{number} completions in one request; the server takes {at_most} at once", param="n")
        own, free = self._taken[tenant] + number, self._most - self.num_taken - number
        if free < 0 or (self._is_shared and own > max(1, free)):
            message = (
                f"{self.num_taken} completions are under way, {self._taken[tenant]} of them yours, of {self._most}"
            )
            headers = {"retry-after": str(RETRY_AFTER)}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
        self._taken[tenant] = own

    def give_back(self, tenant: str, number: int = 1) -> None:
        """Frees seats that were taken."""
        self._taken[tenant] -= number
        if not self._taken[tenant]:
            del self._taken[tenant]

    @contextmanager
    def held(self, tenant: str) -> Iterator[None]:
        """A seat for the block. Raises ``ApiError``."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)
