"""Prometheus metrics under ``qkv:``, in a registry of their own; names and buckets are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qkv_engine import Engine, EngineStats, RequestMetrics, RequestOutput

# Upper edges in seconds, of vLLM's dashboards.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """Histograms of the requests that a server answered, and at every scrape the engine's own figures."""

    def __init__(self, engine: Engine, model: str):
        """``model`` is the value of the label ``model_name``."""
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        histogram = self._histogram
        self._ttft = histogram("time_to_first_token_seconds", "from arrival to the first token", _FIRST_TOKEN)
        self._itl = histogram("inter_token_latency_seconds", "between two tokens of a request", _NEXT_TOKEN)
        self._tpot = histogram("request_time_per_output_token_seconds", "mean of a request's", _NEXT_TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "from arrival to the end", _REQUEST)
        self._queue = histogram("request_queue_time_seconds", "from arrival to the first step", _REQUEST)
        self._prefill = histogram("request_prefill_time_seconds", "from the first step to the first token", _REQUEST)
        self._decode = histogram("request_decode_time_seconds", "from the first token to the last", _REQUEST)
        self._prompt = histogram("request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self._output = histogram("request_generation_tokens", "tokens of all outputs of a prompt", _TOKENS)
        self._ended = self._counter("request_success", "prompts that ended", "finished_reason")
        self._responses = self._counter("http_responses", "HTTP responses", "status")

    def note_response(self, status: int) -> None:
        """Counts one HTTP response."""
        self._responses.labels(self._model, str(status)).inc()

    def note_aborted(self) -> None:
        """Counts a prompt whose reader left before its end."""
        self._ended.labels(self._model, "abort").inc()

    def note_finished(self, output: RequestOutput, num_tokens: int) -> None:
        """Counts a prompt that ended with ``num_tokens`` output tokens, and its times."""
        self._ended.labels(self._model, output.finish_reason or "").inc()
        self._prompt.observe(len(output.prompt_token_ids))
        self._output.observe(num_tokens)
        self._note_times(output.metrics)

    def render(self) -> bytes:
        """The text format. Waits for the engine's thread; raises ``EngineDeadError``."""
        return generate_latest(self._registry)

    def _note_times(self, times: RequestMetrics) -> None:
        for old, new in pairwise(times.token_times):
            self._itl.observe(new - old)
        if len(times.token_times) > 1:
            first, last = times.token_times[0], times.token_times[-1]
            self._tpot.observe((last - first) / (len(times.token_times) - 1))
        spans = (
            (self._ttft, times.arrival_time, times.first_token_time),
            (self._e2e, times.arrival_time, times.finished_time),
            (self._queue, times.arrival_time, times.first_scheduled_time),
            (self._prefill, times.first_scheduled_time, times.first_token_time),
            (self._decode, times.first_token_time, times.last_token_time),
        )
        for histogram, begin, end in spans:
            if begin is not None and end is not None:
                histogram.observe(end - begin)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"qkv:{name}", meaning, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)

    def _counter(self, name: str, meaning: str, label: str) -> Counter:
        return Counter(f"qkv:{name}", meaning, ["model_name", label], registry=self._registry)


class _EngineCollector(Collector):
    """The engine's figures at the moment of a scrape."""

    def __init__(self, engine: Engine, model: str):
        self._engine, self._model = engine, model

    def describe(self) -> Iterator[Metric]:
        """No names: asked for them, the registry would collect, for which the engine may be too busy."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, meaning, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"qkv:{name}", meaning, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, meaning, value in _counters(stats):
            counter = CounterMetricFamily(f"qkv:{name}", meaning, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._blocks(stats)
        yield self._states(stats)
        yield self._hits(stats)
        yield self._demotions("kv_demotions", "blocks of requests that stepped down a rung", stats.demotions)
        yield self._demotions("kv_idle_demotions", "blocks of the prefix cache alone that did", stats.idle_demotions)
        yield self._setting(stats)

    def _blocks(self, stats: EngineStats) -> Metric:
        blocks = GaugeMetricFamily("qkv:kv_blocks", "live blocks by rung", labels=["model_name", "rung"])
        for rung, number in stats.kv_blocks.items():
            blocks.add_metric([self._model, rung], number)
        return blocks

    def _states(self, stats: EngineStats) -> Metric:
        states = GaugeMetricFamily("qkv:kv_states", "live states by format", labels=["model_name", "format"])
        for name, number in stats.kv_states.items():
            states.add_metric([self._model, name], number)
        return states

    def _hits(self, stats: EngineStats) -> Metric:
        meaning = "prompt tokens found in the prefix cache by rung"
        hits = CounterMetricFamily("qkv:prefix_cache_hits_by_rung", meaning, labels=["model_name", "rung"])
        for rung, number in stats.prefix_hits.items():
            hits.add_metric([self._model, rung], number)
        return hits

    def _demotions(self, name: str, meaning: str, steps: dict[str, int]) -> Metric:
        labels = ["model_name", "from_rung", "to_rung"]
        demotions = CounterMetricFamily(f"qkv:{name}", meaning, labels=labels)
        for step, number in steps.items():
            demotions.add_metric([self._model, *step.split("->")], number)
        return demotions

    def _setting(self, stats: EngineStats) -> Metric:
        values = {name: str(getattr(stats, name)) for name in ("device", "dtype", "kv", "max_model_len")}
        setting = GaugeMetricFamily("qkv:cache_config_info", "how KV is kept", labels=["model_name", *values])
        setting.add_metric([self._model, *values.values()], 1)
        return setting


def _gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    total, used, cached = stats.kv_bytes_total, stats.kv_bytes_used, stats.kv_bytes_cached
    miss = [] if stats.basis_miss is None else [stats.basis_miss]
    return [
        ("num_requests_running", "completions in the running batch", stats.num_running),
        ("num_requests_waiting", "completions that wait", stats.num_waiting),
        ("kv_cache_usage_perc", "share of KV memory that live requests hold, 0 to 1", stats.kv_share),
        ("kv_capacity_bytes", "KV memory", total),
        ("kv_used_bytes", "KV memory of live requests", used),
        ("kv_cached_bytes", "KV memory of the prefix cache alone, which yields when needed", cached),
        ("kv_checkpoint_bytes", "part of it that is checkpoints of states", stats.kv_bytes_checkpoints),
        ("kv_free_bytes", "KV memory that nothing holds", total - used - cached),
        ("kv_reserve_bytes", "KV memory kept free for steps down", stats.kv_bytes_reserve),
        ("kv_peak_bytes", "most KV memory in use at one moment", stats.kv_bytes_peak),
        ("kv_capacity_tokens", "tokens of one request on the first rung", stats.kv_tokens_capacity),
        ("kv_floor_tokens", "tokens of one request on the last rung", stats.kv_tokens_floor),
        ("kv_effective_bits", "bits a KV element when the most was held, metadata counted", stats.effective_bits),
        ("host_capacity_bytes", "host memory for cached prefixes", stats.host_bytes_total),
        ("host_used_bytes", "host memory of cached prefixes", stats.host_bytes_used),
        ("host_peak_bytes", "most host memory in use at one moment", stats.host_bytes_peak),
        ("host_blocks", "blocks of cached prefixes in host memory", stats.host_blocks),
        ("store_capacity_bytes", "most that files of the KV store may take", stats.store_bytes_total),
        ("store_used_bytes", "files of the KV store", stats.store_bytes_used),
        ("store_pieces", "pieces of prefixes of this model in the KV store", stats.store_pieces),
        *(("kv_basis_miss", "energy of a plan's last coded channels over the calibrated", value) for value in miss),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "prompt tokens computed", stats.prompt_tokens),
        ("generation_tokens", "tokens sampled", stats.generation_tokens),
        ("num_preemptions", "times a request gave its blocks back", stats.num_preemptions),
        ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
        ("prefix_cache_hits", "prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
        ("state_checkpoints", "checkpoints of states that were taken", stats.num_checkpoints),
        ("state_checkpoint_hits", "requests that began on a checkpoint of states", stats.num_checkpoint_hits),
        ("host_written_bytes", "bytes of blocks copied to host memory", stats.host_bytes_written),
        ("host_fetched_bytes", "bytes of blocks copied back", stats.host_bytes_fetched),
        ("host_dropped_bytes", "bytes of blocks that host memory gave up for others", stats.host_bytes_dropped),
        ("host_fetched_tokens", "tokens of prefixes that came back from host memory", stats.host_fetched_tokens),
        ("store_written_bytes", "bytes written to the KV store", stats.store_bytes_written),
        ("store_read_bytes", "bytes of blocks read from the KV store", stats.store_bytes_read),
        ("store_hit_tokens", "tokens of prefixes read from the KV store", stats.store_hit_tokens),
        ("store_dropped_pieces", "pieces that were not written to the KV store", stats.store_dropped),
        ("store_failed_pieces", "pieces that could not be read from the KV store", stats.store_failed),
        ("engine_steps", "steps launched", stats.num_steps),
    ]
