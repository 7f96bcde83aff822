"""Turns of tenants, for loads without quotas and a host tier: who starts before whom, and places that are left."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .broken import require


def check_turns(scheduler: Any, started: set[str]) -> None:
    """Checks a step in which requests of these tenants started."""
    running = Counter(request.params.tenant for request in scheduler.running)
    waiting = {(request.params.tenant, request.params.priority) for request in scheduler.waiting}
    least = min((priority for _, priority in waiting), default=0)
    free = scheduler.max_num_seqs - len(scheduler.running)
    for tenant in started:
        for other, priority in waiting:
            is_fair = other == tenant or priority > least or running[tenant] <= running[other] + 1
            require(is_fair, "a tenant starts one more while another with fewer waits")
        require(running[tenant] == 1 or len(started) > 1 or running[tenant] <= 7 * free, "no place is left to others")
