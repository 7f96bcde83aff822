"""How many replicas a load wants."""

from __future__ import annotations

import math
from typing import Any

TARGET_LOAD = 0.75  # of a replica; the rest takes bursts while another one starts


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: replicas at which each would be loaded to ``TARGET_LOAD``, and no state.

    Counts what replicas report (``Replica.record_autoscaling_stats``) and the requests for which none had room. Ray
    applies the bounds and the delays.
    """
    metrics = context.aggregated_metrics or {}
    loads, seats = metrics.get("load", {}), metrics.get("seats", {})
    if not loads or not seats:  # none has reported yet
        return context.target_num_replicas, {}
    load = sum(loads.values()) / len(loads) * context.current_num_replicas
    queued = context.total_queued_requests * len(seats) / sum(seats.values())
    return max(1, math.ceil((load + queued) / TARGET_LOAD)), {}
