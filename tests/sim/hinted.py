"""Hints reckoned again: what is retained and until when, within which bytes, and what the end of a session leaves."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .broken import require

if TYPE_CHECKING:
    from .simulator import Simulation
    from .spy import SpySpace

DONE, PLAIN, RETAINED = range(3)


class Hinted:
    """Checks the calls of a space that concern hints. ``now``: of the clock."""

    def __init__(self, space: SpySpace):
        self._space = space
        self.sessions: dict[tuple[str, str], set[bytes]] = {}
        self.until: dict[bytes, float] = {}  # the longest life that was asked for
        self._tenants: dict[bytes, str] = {}  # who asked for it

    @property
    def _hints(self) -> Any:
        return self._space.prefix.hints

    def release(self, request: Any) -> None:
        """Notes that blocks are taken back, with the hints of their request."""
        params, space = request.params, self._space
        if space.prefix is None or not (params.session or params.retain is not None):
            space._space.release(request)
            return
        ends = space.cached.ends(min(request.num_computed_tokens, len(request.token_ids)))
        keys = [key for key in space.cached.keys(request, ends) if key in space.prefix._entries]
        before = dict(self._hints._lives)
        space._space.release(request)
        if params.session:
            self.sessions.setdefault((params.tenant, params.session), set()).update(keys)
        if params.retain is None:
            return
        hints, until = self._hints, self._hints._clock() + params.retain
        for key in keys:
            life = hints._lives.get(key)
            if life is None:
                nbytes = sum(group.sizes[0] for group in space.options.groups)
                own = hints._nbytes[params.tenant] + nbytes > hints._tenant_nbytes
                require(own or hints.retained_nbytes + nbytes > hints._most_nbytes, "a piece is not retained")
                return
            if key not in before or before[key].until < until:
                self.until[key], self._tenants[key] = until, params.tenant
            require(life.until == self.until[key], "a piece is retained for another time")
            require(life.tenant == self._tenants[key], "a piece counts for another tenant")

    def done(self, tenant: str, session: str) -> None:
        """Ends a session."""
        gone = self.sessions.pop((tenant, session), set())
        others = set[bytes]().union(*self.sessions.values())
        number = self._space._space.done(tenant, session)
        require(number == len(gone - others), "other pieces are done than those of the session alone")
        for key in gone - others:
            self.until.pop(key, None)
            require(self._hints.rank(key) == DONE, "a piece that is done is kept like others")

    def check(self) -> None:
        """Checks what is retained, after any event."""
        if self._space.prefix is None:
            return
        hints = self._hints
        total = Counter[str]()
        for key, life in hints._lives.items():
            total[life.tenant] += life.nbytes
            require(life.until == self.until.get(key), "a piece is retained that nobody asked for")
            require(hints.rank(key) == RETAINED or key in hints._done, "a retained piece yields like others")
        require(total == +hints._nbytes, "retained bytes are miscounted")
        require(total.total() <= hints._most_nbytes, "too much is retained")
        require(all(n <= hints._tenant_nbytes for n in total.values()), "too much of a tenant is retained")

    def check_expired(self) -> None:
        """Checks that nothing is retained beyond its time, as a step begins."""
        if self._space.prefix is not None:
            now = self._hints._clock()
            late = [key for key, life in self._hints._lives.items() if life.until <= now]
            require(not late, "a piece is retained beyond its time")


def timed_hints(simulation: Simulation, tables: Any, tier: Any) -> Any:
    """Hints whose clock counts events."""
    hints = simulation.code.make_hints(tables, tier, simulation.options.quota)
    hints._clock = lambda: float(simulation.num_events)
    return hints


def end_session(simulation: Simulation) -> None:
    """Ends a session now and then."""
    options, rng = simulation.options, simulation.rng
    if options.hints and rng.random() < 0.1:
        simulation.space.hinted.done(f"t{rng.randrange(options.tenants)}", rng.choice("abc"))
        simulation.event("done")
