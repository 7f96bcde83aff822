"""``Engine.sleep`` on a GPU: the device has its memory back until the engine wakes, and tokens are the same."""

from __future__ import annotations

import pytest
import torch

from qkv_engine import Engine, SamplingParams

pytestmark = pytest.mark.gpu

GIB = 2**30
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.mark.parametrize("resizable", [False, True])
def test_memory_of_the_device_goes_back(resizable: bool):
    if resizable:
        pytest.importorskip("cuda.bindings.driver")
    with Engine(kv_memory=4 * GIB, host_memory=GIB, resizable=resizable) as engine:
        expected = engine.generate("What is 6*7? " * 50, PARAMS)[0].token_ids
        for _ in range(2):
            before = torch.cuda.mem_get_info()[0]
            engine.sleep()
            asleep = torch.cuda.mem_get_info()[0]
            assert asleep - before >= 4 * GIB
            engine.wake()  # captured steps may come back later, as they are met
            assert asleep - torch.cuda.mem_get_info()[0] >= 4 * GIB
            assert engine.generate("What is 6*7? " * 50, PARAMS)[0].token_ids == expected
