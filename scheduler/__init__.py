"""Scheduling decisions, without tensors."""

from .output import ScheduledBatch, ScheduledRequest
from .pressure import KVSpace
from .scheduler import Scheduler

__all__ = ["KVSpace", "ScheduledBatch", "ScheduledRequest", "Scheduler"]
