"""Times of a request, counters of an engine, and the snapshot ``Engine.stats()`` returns."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A snapshot of load, memory and counters. Bytes are bytes allocated; counters run since start or ``reset_stats``.

    Setting
        time: of the snapshot, in seconds of ``time.monotonic()``, the clock of ``RequestMetrics``.
        model, device, dtype, kv: names of the model, its device, the dtype of its weights, and the KV preset.
        max_model_len: tokens of the longest request.
        num_threads: CPU threads that the engine's own thread computes with.

    Requests
        num_running, num_waiting: live requests by state.
        num_requests: submitted.
        num_finished: ended without an error, aborted ones included.
        num_failed: ended by an error while they ran.
        num_refused: refused by the scheduler, before they ran.
        num_preemptions: times a running request gave its blocks back, to be computed again.

    Work
        num_steps: steps launched.
        prompt_tokens: computed; recomputed ones are counted again.
        generation_tokens: sampled.
        prefix_query_tokens, prefix_hit_tokens: looked up in the prefix cache, and found there.
        prefix_hits: tokens found there by the rung that they stood on; where layers have different windows, in those
            that see the most.
        num_checkpoints: copies of states that requests left for later ones; of models with such layers.
        num_checkpoint_hits: requests that began on one.
        num_demotions: blocks, and states, of requests that stepped down a rung.
        demotions: the same by step, such as {"int8->int4": 3, "float32->int16": 48}.
        num_idle_demotions: blocks, and copies of states, of the prefix cache alone that stepped down a rung.
        idle_demotions: the same by step.

    KV memory
        kv_bytes_total: held by the engine.
        kv_bytes_used: of live requests.
        kv_bytes_cached: of the prefix cache alone, which step down and are given up when needed.
        kv_bytes_checkpoints: of those, copies of states.
        kv_bytes_reserve: kept free, so that a step down always finds a place to write.
        kv_bytes_peak: most used at one moment.
        kv_bytes_codes, kv_bytes_meta, kv_bytes_dense: parts of the peak: low-precision codes, their metadata with all
            padding, and 16- or 32-bit elements.
        kv_bytes_state: the rest of the peak, states of layers without KV.
        kv_rungs: bits a KV element of each rung, all metadata counted, widest first; layers with a window count by
            what they hold of a request of ``max_model_len`` tokens.
        kv_blocks: live blocks by rung.
        kv_states: live states, and copies of some, by format; of models with such layers.
        kv_group_blocks: the same for each group of layers, in the order of ``qkv-engine env``, if there are two.
        kv_group_bytes: of these blocks, by group.
        kv_group_windows: tokens that a token sees in each group, None for all.
        kv_tokens_capacity, kv_tokens_floor: tokens of one request that fits alone on the first rung, and on the last.
        effective_bits: bits a KV element, all metadata counted, when the most was held; those of the first rung if
            nothing was.
        basis_miss: of a plan with bases, how much more the last channels with codes of the newest graded blocks vary
            than in calibration: about 1 for its texts, a warning above 2.5; None before there are such blocks.

    Host memory
        host_bytes_total: of all ranks together; 0 without ``host_memory``.
        host_bytes_used, host_bytes_peak: of copies of cached blocks now, and the most at one moment.
        host_blocks: copies of cached blocks.
        host_bytes_written, host_bytes_fetched, host_bytes_dropped: copied there, copied back, and given up for others.
        host_fetched_tokens: of prefixes that came back; where layers have different windows, in those that see the
            most.

    KV store
        store_bytes_total: the most that its files may take; 0 without ``kv_store``.
        store_bytes_used, store_pieces: of its files now, those of other models included, and pieces of prefixes of
            this one.
        store_bytes_written, store_bytes_read: since the engine started, headers and padding counted as they are
            written.
        store_hit_tokens: of prefixes that were read into host memory.
        store_dropped, store_failed: pieces that were not written, for lack of time or room, and that could not be read.
    """

    time: float
    model: str
    device: str
    dtype: str
    kv: str
    max_model_len: int
    num_threads: int
    num_running: int
    num_waiting: int
    num_requests: int
    num_finished: int
    num_failed: int
    num_refused: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    num_demotions: int
    demotions: dict[str, int]
    num_idle_demotions: int = 0
    idle_demotions: dict[str, int] = {}
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_hits: dict[str, int] = {}
    num_checkpoints: int = 0
    num_checkpoint_hits: int = 0
    kv_bytes_total: int
    kv_bytes_used: int
    kv_bytes_cached: int
    kv_bytes_checkpoints: int = 0
    kv_bytes_reserve: int
    kv_bytes_peak: int
    kv_bytes_codes: int
    kv_bytes_meta: int
    kv_bytes_dense: int
    kv_bytes_state: int = 0
    kv_rungs: dict[str, float]
    kv_blocks: dict[str, int]
    kv_states: dict[str, int] = {}
    kv_group_blocks: tuple[dict[str, int], ...] = ()
    kv_group_bytes: tuple[int, ...] = ()
    kv_group_windows: tuple[int | None, ...] = ()
    kv_tokens_capacity: int
    kv_tokens_floor: int
    effective_bits: float
    basis_miss: float | None = None
    host_bytes_total: int = 0
    host_bytes_used: int = 0
    host_bytes_peak: int = 0
    host_blocks: int = 0
    host_bytes_written: int = 0
    host_bytes_fetched: int = 0
    host_bytes_dropped: int = 0
    host_fetched_tokens: int = 0
    store_bytes_total: int = 0
    store_bytes_used: int = 0
    store_pieces: int = 0
    store_bytes_written: int = 0
    store_bytes_read: int = 0
    store_hit_tokens: int = 0
    store_dropped: int = 0
    store_failed: int = 0

    @property
    def kv_share(self) -> float:
        """Share of KV memory that live requests hold; 0 while the engine sleeps."""
        return self.kv_bytes_used / self.kv_bytes_total if self.kv_bytes_total else 0.0

    def to_dict(self) -> dict[str, object]:
        return msgspec.structs.asdict(self)


class Counters(msgspec.Struct):
    """Running counters of the engine's thread."""

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of a request's events, in seconds of ``time.monotonic()``; None until the event has happened.

    Fields
        arrival_time: it was submitted.
        first_scheduled_time: its first step was launched.
        first_token_time, last_token_time: its first and newest output token came.
        finished_time: it ended.
        token_times: times of the output tokens of the first completion.
        num_preemptions: how often it gave its KV blocks back, to be computed again.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = []
    num_preemptions: int = 0
