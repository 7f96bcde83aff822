"""What a tier keeps for each tenant, and who is over its share of it: that tenant's is given up first. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection


class TenantShares:
    """Bytes of a tier by tenant. ``most_nbytes``: those of a share now; None: no tenant is ever over its share."""

    def __init__(self, most_nbytes: Callable[[], float] | None = None):
        self._most_nbytes = most_nbytes
        self.is_kept = most_nbytes is not None  # whether tenants have shares
        self._nbytes: Counter[str] = Counter()
        self._most, self._over = 0.0, dict[str, None]()

    @property
    def over(self) -> Collection[str]:
        """The tenants that are over their share."""
        if self._most_nbytes is not None and self._most != (most := self._most_nbytes()):
            self._most = most
            self._over = dict.fromkeys(tenant for tenant, nbytes in self._nbytes.items() if nbytes > most)
        return self._over

    def add(self, tenant: str, nbytes: int) -> None:
        """Counts bytes of a tenant in; out if they are negative."""
        if self._most_nbytes is None:
            return
        self._nbytes[tenant] += nbytes
        if self._nbytes[tenant] > self._most:
            self._over[tenant] = None
        else:
            self._over.pop(tenant, None)
        if not self._nbytes[tenant]:
            del self._nbytes[tenant]

    def clear(self) -> None:
        """Counts anew."""
        self._nbytes.clear()
        self._over.clear()
