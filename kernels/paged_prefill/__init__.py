"""Prefill attention: a chunk of new tokens over itself and the request's earlier blocks."""

from .cpu import paged_prefill
from .reference import paged_prefill_reference

__all__ = ["paged_prefill", "paged_prefill_reference"]
