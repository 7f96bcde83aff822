"""Some twenty mixed requests at once, on memory for a fraction of them: each is answered as it is alone."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import pytest

from qkv_engine import Engine, RequestOutput, SamplingParams

from ..small_demo import small_demo

NUM_REQUESTS = 22


@dataclass(frozen=True)
class Load:
    prompt: list[int]
    params: SamplingParams
    delay: float  # seconds after the start
    abort_after: int | None  # outputs read before the caller goes away


# Short prompts that are all let in at once and then outgrow the memory together.
MARATHONS = [
    Load([9, 8, i], SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True), 0.0, None) for i in range(7)
]


def make_load(rng: random.Random, stops: list[str]) -> Load:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=rng.choice((1, 2, 10, 30, 60)),
        stop=rng.sample(stops, 2) if rng.random() < 0.3 else None,
        stop_token_ids=[rng.randrange(5, 1000)] if rng.random() < 0.2 else None,
        ignore_eos=rng.random() < 0.7,
        repetition_penalty=1.2 if rng.random() < 0.2 else 1.0,
    )
    prompt = [rng.randrange(5, 1000) for _ in range(rng.choice((1, 5, 60, 127, 128, 129, 300)))]
    abort_after = rng.randint(1, 5) if rng.random() < 0.15 else None
    return Load(prompt, params, rng.random() * 3, abort_after)


def answer(engine: Engine, load: Load) -> RequestOutput:
    """Reads a stream to its end, or aborts on the way and takes what is there."""
    stream = engine.stream(load.prompt, load.params)
    outputs = []
    for output in stream:
        outputs.append(output)
        if len(outputs) == load.abort_after:
            engine.abort(stream.request_id)
    return outputs[-1]


def test_every_request_is_answered_as_it_is_alone(monkeypatch: pytest.MonkeyPatch):
    # Admission that looks at nothing, so that memory runs out and requests are preempted.
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    rng = random.Random(7)
    loads = [make_load(rng, [" a", "1", "so", "e", "\n", "="]) for _ in range(NUM_REQUESTS)]
    loads[: len(MARATHONS)] = MARATHONS
    with Engine(small_demo(), kv="fp32", kv_memory="1GiB", max_num_seqs=1) as engine:
        alone = [engine.generate([load.prompt], load.params)[0] for load in loads]
    found: dict[int, RequestOutput] = {}
    with Engine(
        small_demo(), kv="fp32", kv_memory="4MiB", max_num_seqs=30, max_num_batched_tokens=256, max_model_len=512
    ) as engine:

        def client(mine: range) -> None:
            started = time.monotonic()
            for i in mine:
                time.sleep(max(0.0, loads[i].delay * mine.index(i) / len(mine) - (time.monotonic() - started)))
                found[i] = answer(engine, loads[i])

        threads = [threading.Thread(target=client, args=(range(i, NUM_REQUESTS, 18),)) for i in range(18)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        stats = engine.stats()
        assert stats.kv_bytes_used == 0 and stats.num_running == stats.num_waiting == 0
        assert stats.num_preemptions > 0, "the load never ran short of memory"
    assert sorted(found) == list(range(NUM_REQUESTS))
    for i, load in enumerate(loads):
        mine, single = found[i].outputs[0], alone[i].outputs[0]
        assert found[i].finished
        if mine.finish_reason == "abort":
            assert load.abort_after is not None
            assert mine.token_ids == single.token_ids[: len(mine.token_ids)]
        else:
            assert (mine.token_ids, mine.text) == (single.token_ids, single.text)
            assert (mine.finish_reason, mine.stop_reason) == (single.finish_reason, single.stop_reason)
    assert any(output.outputs[0].finish_reason == "abort" for output in found.values())
