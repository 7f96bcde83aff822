"""Bugs put into the shares of tenants in idle blocks and in host memory on purpose, each with a seed that shows it."""

from __future__ import annotations

from .mutants_cases import Bug


def _bug(name: str, where: str, old: str, new: str, seed: int) -> Bug:
    """``where``: "module Class.method"."""
    file, function = where.split()
    return Bug(name, file, function, old, new, case="quotas", seed=seed)


SHARE_BUGS = (
    _bug("nobody is over a share", "shares TenantShares.add", "self._nbytes[tenant] > self._most", "False", 15012),
    _bug(
        "who is back within a share is over it still",
        "shares TenantShares.add",
        "self._over.pop(tenant, None)",
        "pass",
        15003,
    ),
    _bug(
        "shares are those of the start",
        "shares TenantShares.over",
        "self._most_nbytes is not None and self._most != (most := self._most_nbytes())",
        "self._most_nbytes is not None and (not self._most) and (most := self._most_nbytes())",
        15019,
    ),
    _bug(
        "everybody's blocks step down while one is over a share",
        "idle IdleBlocks.coldest",
        "self._in_turn(self._steps)",
        "list(self._steps)",
        15019,
    ),
    _bug(
        "everybody's blocks go while one is over a share",
        "idle IdleBlocks.next_exit",
        "self._in_turn(self._exits)",
        "list(self._exits)",
        15034,
    ),
    _bug(
        "what is taken up counts as idle",
        "prefix PrefixCache.__init__",
        "tables.store.on_change = self.idle.recount",
        "",
        15001,
    ),
    _bug("blocks count for nobody", "manager KVManager._publish", "request.params.tenant", "''", 15000),
    _bug(
        "what comes back counts for nobody",
        "host_traffic HostTraffic.begin_step",
        "self._prefix.file(piece.key, piece.parent, piece.tokens, blocks, piece.tenant)",
        "self._prefix.file(piece.key, piece.parent, piece.tokens, blocks)",
        15044,
    ),
    _bug(
        "what leaves counts for nobody",
        "host_traffic HostTraffic.move_out",
        "self.tier.move_out(entry.key, entry.parent, entry.tokens, block, number, entry.tenant)",
        "self.tier.move_out(entry.key, entry.parent, entry.tokens, block, number)",
        15003,
    ),
    _bug("what is read counts for nobody", "disk_traffic DiskTraffic._begin", "request.params.tenant", "''", 15044),
    _bug(
        "copies go whoever is over a share",
        "host_tier HostTier._oldest",
        "self._oldest_of(over, key) if over else None",
        "None",
        15003,
    ),
    _bug(
        "others yield to who is over a share",
        "host_tier HostTier._oldest",
        "found is None and self._pieces[key].tenant not in over",
        "found is None",
        15047,
    ),
    _bug(
        "a copy that is gone counts still",
        "host_tier HostTier._forget",
        "self.shares.add(piece.tenant, -copy.slot.nbytes)",
        "",
        15003,
    ),
)
