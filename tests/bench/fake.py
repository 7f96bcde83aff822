"""An engine of exact, made-up times: a prompt takes 50 ms, every further step 10 ms, on a clock that it owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from qkv_engine.bench.sweep import SweepRow
from qkv_engine.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

PREFILL, STEP, BLOCK = 0.05, 0.01, 1000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeEngine:
    """Runs ``slots`` requests at once, part after part; ``raises`` maps a batch size to what it raises."""

    clock: Clock = field(default_factory=Clock)
    slots: int = 1000
    raises: dict[int, BaseException] = field(default_factory=dict)
    tokens_short: int = 0
    with_token_times: bool = True
    vocab_size: int = 50
    closed: int = 0
    prompts: list[list[list[int]]] = field(default_factory=list)
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(special_ids=frozenset({0, 1, 2})))
    peak: int = 0

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed += 1

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        self.prompts.append(prompts)
        if error := self.raises.get(len(prompts)):
            raise error
        arrival, outputs = self.clock.now, []
        assert params.max_tokens is not None and params.is_greedy and params.ignore_eos
        for first in range(0, len(prompts), self.slots):
            part = prompts[first : first + self.slots]
            outputs += self._run(part, params.max_tokens - self.tokens_short, arrival)
            self.peak = max(self.peak, len(part) * BLOCK)
        return outputs

    def _run(self, prompts: list[list[int]], num_tokens: int, arrival: float) -> list[RequestOutput]:
        scheduled = self.clock.now
        times = [scheduled + PREFILL + i * STEP for i in range(num_tokens)]
        self.clock.now = times[-1]
        metrics = RequestMetrics(
            arrival_time=arrival,
            first_scheduled_time=scheduled,
            first_token_time=times[0],
            last_token_time=times[-1],
            finished_time=times[-1],
            token_times=times if self.with_token_times else [],
        )
        completion = CompletionOutput(index=0, token_ids=[7] * num_tokens, finish_reason="length")
        return [
            RequestOutput(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=prompt,
                outputs=[completion],
                finished=True,
                metrics=metrics,
            )
            for i, prompt in enumerate(prompts)
        ]

    def reset_stats(self) -> None:
        self.peak = 0

    def stats(self) -> Any:
        return SimpleNamespace(
            num_threads=1,
            device="cpu",
            dtype="float32",
            kv_bytes_total=64 * BLOCK,
            kv_bytes_peak=self.peak,
            kv_bytes_reserve=BLOCK,
            kv_bytes_codes=self.peak // 2,
            kv_bytes_meta=self.peak // 10,
            kv_bytes_dense=self.peak - self.peak // 2 - self.peak // 10,
            kv_bytes_state=0,
            effective_bits=4.5,
            kv_rungs={"dense16": 16.0, "int4": 4.28},
            num_demotions=3,
            num_idle_demotions=0,
            num_preemptions=0,
            num_finished=0,
            num_failed=0,
            prompt_tokens=0,
            generation_tokens=0,
        )


def make_row(**values: Any) -> SweepRow:
    """A measured row, with ``values`` for what a test is about."""
    defaults: dict[str, Any] = {
        "model": "demo",
        "device": "cpu",
        "threads": 2,
        "dtype": "float32",
        "kv": "bf16",
        "batch": 1,
        "input_len": 16,
        "output_len": 8,
        "repeats": 3,
        "output_tok_s": 1000.0,
        "output_tok_s_min": 990.0,
        "output_tok_s_max": 1010.0,
        "total_tok_s": 3000.0,
        "decode_tok_s": 1200.0,
        "ttft_ms": 10.0,
        "tpot_ms": 0.8,
        "itl_ms": 0.8,
        "itl_p99_ms": 1.25,
        "kv_bytes_total": 4 * 2**20,
        "kv_bytes_peak": 2**20,
        "kv_bytes_codes": 0,
        "kv_bytes_meta": 0,
        "kv_bytes_dense": 2**20,
        "effective_bits": 16.0,
        "max_running": 1,
        "demotions": 0,
        "preemptions": 0,
        "status": "ok",
    }
    return SweepRow(**defaults | values)
