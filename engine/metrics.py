"""Counters of an engine and the snapshot ``Engine.stats()`` returns."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot. Bytes are bytes allocated, not computed; counters run since start or ``reset_stats``."""

    model: str
    device: str
    dtype: str
    kv: str
    max_model_len: int
    num_threads: int  # on the CPU
    num_running: int
    num_waiting: int
    num_requests: int  # submitted
    num_finished: int
    num_failed: int
    num_refused: int  # at submit
    num_steps: int
    prompt_tokens: int  # computed, recomputed ones counted again
    generation_tokens: int
    num_preemptions: int
    num_demotions: int
    demotions: dict[str, int]  # by step, such as "int8->int4"
    prefix_query_tokens: int  # tokens looked up in the prefix cache, and found there
    prefix_hit_tokens: int
    kv_bytes_total: int
    kv_bytes_used: int  # by live requests
    kv_bytes_cached: int  # by the prefix cache alone, given up when needed
    kv_bytes_peak: int
    kv_bytes_codes: int  # of the peak: low-precision codes, their metadata, and dense elements
    kv_bytes_meta: int
    kv_bytes_dense: int
    kv_blocks: dict[str, int]  # live blocks by rung
    kv_tokens_capacity: int  # of one request on the widest rung
    kv_tokens_floor: int  # of one request on the last rung
    effective_bits: float  # per KV element when the most were held, metadata counted; of the widest rung without any

    def to_dict(self) -> dict[str, object]:
        return msgspec.structs.asdict(self)


class Counters(msgspec.Struct):
    """What the engine's thread counts as it goes."""

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
