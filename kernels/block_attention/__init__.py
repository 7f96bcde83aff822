"""Attention of one query over one sealed block, for many (query, block) pairs at once: parts of decode attention."""

from __future__ import annotations

from .cpu import block_attention
from .reference import block_attention_reference

__all__ = ["block_attention", "block_attention_reference"]
