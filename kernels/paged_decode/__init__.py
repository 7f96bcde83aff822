"""Decode attention: one new query per request over its paged KV."""

from .cpu import DecodePlan, paged_decode
from .reference import paged_decode_reference

__all__ = ["DecodePlan", "paged_decode", "paged_decode_reference"]
