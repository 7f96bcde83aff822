"""What an answer says of the KV of its request, beside the numbers of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from qkv_engine import RequestOutput


class AnswerKV(NamedTuple):
    """KV of all prompts of a request.

    Fields
        num_cached: prompt tokens found in the prefix cache.
        cached_by_rung: the same by the rung on which they were found.
        bits: the fewest bits that codes of the KV came down to.
        blocks: blocks by their final rung.
    """

    num_cached: int
    cached_by_rung: Counter[str]
    bits: float | None
    blocks: Counter[str]


def kv_usage(outputs: Sequence[RequestOutput]) -> AnswerKV:
    """The KV of the newest outputs of all prompts."""
    blocks, cached = Counter[str](), Counter[str]()
    for output in outputs:
        blocks.update(output.kv.blocks)
        cached.update(output.kv.cached_tokens)
    bits = min((o.kv.lowest_bits for o in outputs if o.kv.lowest_bits is not None), default=None)
    return AnswerKV(sum(output.num_cached_tokens for output in outputs), cached, bits, blocks)
