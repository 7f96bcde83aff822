"""Graded sides beside other families, layer by layer: blocks step down to them, and answers stay right."""

from __future__ import annotations

import pytest

from qkv_engine import Engine, KVConfig, RungConfig
from qkv_engine.bench.grading import grade
from qkv_engine.bench.questions import ask, parse_tasks
from qkv_engine.config import DENSE16

# Of K and V of the demo model's eight layers, in turn: graded beside uniform sides of both axes, and Kitty's.
FLOOR_K = ("graded-32x8-96x4", "int4-channel-128", "kitty-25", "graded-64x4-64x2") * 2
FLOOR_V = ("graded-16x8-112x4", "int4-token-128", "int4-token-128", "int8-channel-128") * 2
WIDE_V = ("int8-channel-128", "int8-token-128", "int8-token-128", "int8-channel-128") * 2
WIDE = RungConfig("wide", "int8-channel-128", WIDE_V)
FLOOR = RungConfig("floor", FLOOR_K, FLOOR_V)


@pytest.mark.parametrize("eager", [True, False])
def test_answers_are_right_on_a_floor_of_several_families(eager: bool):
    kv = KVConfig(name="several", rungs=(DENSE16, WIDE, FLOOR), sink=32, recent=0, eager=eager)
    (task,) = parse_tasks("lookup:60", samples=6, seed=1)
    with Engine(kv=kv, kv_memory="96MiB" if eager else "10MiB", prefix_caching=False) as engine:
        asks = ask(engine.tokenizer, task.examples)
        outputs = engine.generate([one.prompt for one in asks], [one.params for one in asks])
        stats = engine.stats()
    assert grade([output.text for output in outputs], task.examples).correct == 6
    taken = {"dense16->floor"} if eager else {"dense16->wide", "wide->floor"}
    assert taken <= set(stats.demotions) and all(output.kv.blocks["floor"] for output in outputs if eager)
