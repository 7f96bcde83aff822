"""Scheduling decisions, without tensors."""

from .output import ScheduledBatch, ScheduledRequest
from .pace import Pace
from .scheduler import Scheduler
from .space import KVSpace

__all__ = ["KVSpace", "Pace", "ScheduledBatch", "ScheduledRequest", "Scheduler"]
