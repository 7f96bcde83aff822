"""Scheduling decisions, without tensors."""

from .output import ScheduledBatch, ScheduledRequest
from .scheduler import Scheduler
from .space import KVSpace

__all__ = ["KVSpace", "ScheduledBatch", "ScheduledRequest", "Scheduler"]
