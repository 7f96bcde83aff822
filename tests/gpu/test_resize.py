"""``Engine.resize`` on a GPU: the device's free memory follows, graphs stay valid, pinned tokens are unchanged."""

from __future__ import annotations

import threading

import pytest
import torch

from qkv_engine import ConfigError, Engine, RequestOutput, SamplingParams
from qkv_engine.device.gpu.mapped import find_driver

pytestmark = pytest.mark.gpu

GIB = 2**30
PROMPTS = [f"{number}: " + " ".join(str(number * i) for i in range(60)) for number in range(20)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, kv_pinned=number % 4 == 0) for number in range(20)
]


def test_memory_of_the_device_follows_beside_requests():
    if find_driver(torch.device("cuda", 0)) is None:
        with pytest.raises(ConfigError, match=r"resizable.*cuda-bindings"):
            Engine(kv_memory=GIB, resizable=True)
        return
    with Engine(kv_memory=4 * GIB, resizable=True, dtype="float32") as engine:  # others change no product by much
        alone = engine.generate(PROMPTS, PARAMS)
        found = list[RequestOutput]()
        thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, PARAMS)))
        thread.start()
        number = 0
        while thread.is_alive():
            whole = torch.cuda.mem_get_info()[0]
            held = engine.resize(GIB)
            assert 0.97 * GIB < held <= GIB
            assert torch.cuda.mem_get_info()[0] - whole > 2.9 * GIB
            assert engine.resize(4 * GIB) == 4 * GIB
            number += 1
        thread.join()
        assert number >= 3 and engine.stats().num_preemptions == 0
    assert [len(output.token_ids) for output in found] == [1000] * 20
    assert [found[i].token_ids for i in range(0, 20, 4)] == [alone[i].token_ids for i in range(0, 20, 4)]


def test_other_memory_is_fixed():
    with Engine(kv_memory=GIB) as engine, pytest.raises(ConfigError, match=r"fixed.*resizable=True"):
        engine.resize(GIB // 2)
