"""Groups of layers on the devices: equal tokens however layers are grouped, and windows that free memory."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from qkv_engine import Engine
from qkv_engine.device import layouts
from qkv_engine.device.layouts import ladder_of_layers
from qkv_engine.errors import ConfigError
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.slabs import make_tables
from qkv_engine.layer_kv import LayerKV
from qkv_engine.loading import rank_ladder
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS
from qkv_engine.request import KVUsage, SamplingParams
from qkv_engine.serving.snapshot import take_snapshot
from qkv_engine.serving.submission import Submission

from ..small_demo import small_demo
from .test_command import Twin
from .test_run_ahead import begin, make_load, play, seen

WINDOW = 150


def by_parity(layers: list[LayerKV]) -> list[tuple[int, ...]]:
    return [tuple(range(first, len(layers), 2)) for first in (0, 1)]


def answers(kv: str, memory: str) -> tuple[list[Any], int, int]:
    """Of a load, with the capacity of the cache and its slab."""
    started = begin(kv, memory)
    cache = started.core.runner.cache
    outputs = play(started.core, make_load(started, 1, 10), {10: "r3"})
    assert not any(output.error for output in outputs)
    # Usage counts the blocks of all groups.
    found = [[part for part in seen(output) if not isinstance(part, KVUsage)] for output in outputs]
    return found, cache.tables.max_tokens(0), cache.arena.slab_nbytes


@pytest.mark.parametrize("kv", ["int4", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("bf16", "patternkv"))])
def test_layers_in_two_equal_groups_give_the_same_tokens(kv: str, monkeypatch: pytest.MonkeyPatch):
    mine, capacity, _ = answers(kv, "64MiB")
    monkeypatch.setattr(layouts, "group_layers", by_parity)
    theirs, split_capacity, slab = answers(kv, "64MiB")
    assert mine == theirs
    token = 2**26 / capacity
    assert split_capacity >= capacity - 4 * slab / token - 256


def with_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the demo model's odd layers see a window."""

    def kv_of_layers(model: Any, max_model_len: int | None = None) -> list[LayerKV]:
        return [
            LayerKV(spec.num_kv_heads, spec.head_dim, WINDOW if layer % 2 else None)
            for layer, spec in enumerate(model.attention)
        ]

    monkeypatch.setattr("qkv_engine.loading.kv_of_layers", kv_of_layers)


@pytest.mark.parametrize(
    ("kv", "memory"), [("auto", "2MiB"), pytest.param("patternkv", "8MiB", marks=pytest.mark.slow)]
)
def test_commands_carry_all_that_two_groups_depend_on(kv: str, memory: str, monkeypatch: pytest.MonkeyPatch):
    with_windows(monkeypatch)
    started = begin(kv, memory)
    core, runner = started.core, started.core.runner
    assert len(runner.cache.ladder.groups) == 2
    twin = Twin(runner)
    runner.backend = twin  # type: ignore[assignment]
    outputs = play(core, make_load(started, 1, 20), {20: "r3"})
    assert not any(output.error for output in outputs) and twin.num_groups and twin.num_gone_on


def test_host_memory_holds_as_many_tokens_as_the_start_says(monkeypatch: pytest.MonkeyPatch):
    """Copies of all blocks of a prefix, also of those that no token in KV memory sees any more."""
    with_windows(monkeypatch)
    number, prompt = 9, [random.Random(1).randrange(1000) for _ in range(9 * 128 + 1)]
    with Engine(small_demo(), kv="bf16", kv_memory="24MiB", host_memory="32MiB", num_threads=1) as engine:
        engine.generate([prompt], SamplingParams(max_tokens=1))
        deadline = time.monotonic() + 30
        while engine.stats().host_blocks < 2 * number:
            assert time.monotonic() < deadline, "not all blocks are copied"
            time.sleep(0.01)
        stats, told = engine.stats(), next(line for line in engine.describe() if "Host" in line)
    token = stats.host_bytes_used / (number * 128)
    assert f": {int(stats.host_bytes_total / token / 128) * 128:,} tokens of prefixes" in told


def test_a_window_keeps_few_blocks_of_a_request(monkeypatch: pytest.MonkeyPatch):
    with_windows(monkeypatch)
    started = begin("bf16", "16MiB", max_model_len=600)
    core, tables = started.core, started.core.runner.cache.tables
    params = SamplingParams(temperature=0.0, max_tokens=280, ignore_eos=True)
    submission = Submission("long", None, [7] * 250, params, 280, 0, [], False, floor=0)
    core.live[submission.request_id] = submission
    core.add(submission)
    most, request_id = [0, 0], submission.request_id
    while core.has_work:
        core.step()
        if request_id in tables.main:
            most = [max(n, len(group[request_id].blocks)) for n, group in zip(most, tables.groups, strict=True)]
    assert most[0] >= 4 and most[1] <= WINDOW // 128 + 2
    stats = take_snapshot(started)
    full, window = stats.kv_group_blocks
    assert stats.kv_blocks == Counter(full) + Counter(window) and full["dense16"] >= window["dense16"] > 0
    block = 2 * 2 * 128 * 128 * 2  # of one layer
    assert stats.kv_group_bytes == (block * full["dense16"], block * window["dense16"])
    assert stats.kv_group_windows == (None, WINDOW)


def test_bits_of_rungs_count_layers_by_what_they_hold_of_the_longest_request(monkeypatch: pytest.MonkeyPatch):
    """Of 1,500 tokens the layers with a window hold 150, at 8 bits where the others have 4."""
    with_windows(monkeypatch)
    narrow, wide = take_snapshot(begin("auto", "16MiB", max_model_len=1500)).kv_rungs, 16.0
    eight, four = 8.28125, 4.28125
    assert narrow == pytest.approx({"dense16": wide, "int8": eight, "int4": (four * 10 + eight) / 11})


def test_one_group_has_no_figures_of_its_own():
    stats = take_snapshot(begin("bf16", "16MiB"))
    assert stats.kv_group_blocks == () and b"kv_group_blocks" not in msgspec.json.encode(stats)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupts_within_changes_of_the_books_leave_nothing_behind(seed: int, monkeypatch: pytest.MonkeyPatch):
    """They come before or after any change of the books; ``play`` sees that no byte is left."""
    with_windows(monkeypatch)
    calm, core = begin("auto", "2MiB").core, (started := begin("auto", "2MiB")).core
    rng, counts = random.Random(seed), Counter[str]()
    with monkeypatch.context() as patched:
        for name in ("trim", "reserve", "demote", "open", "release"):
            patched.setattr(KVManager, name, interrupted(name, getattr(KVManager, name), rng, counts))
        load = make_load(started, seed, 12)
        outputs = play(core, load, {}, Interrupted)
    assert len(outputs) == 12 and not any(output.error for output in outputs)
    assert sum(counts.values()) >= 5
    later = [make_load(started, seed + 10, 4)[-1:] for _ in range(2)]
    expected, found = (seen(play(each, load, {})[0]) for each, load in zip((calm, core), later, strict=True))
    assert found == expected


class Interrupted(BaseException):
    """Like ``KeyboardInterrupt``."""


def interrupted(name: str, call: Callable[..., Any], rng: random.Random, counts: Counter[str]) -> Callable[..., Any]:
    """``call``, broken off at random before or after it does its work."""

    def attempt(*args: Any) -> Any:
        before = rng.random() < 0.05
        found = None if before else call(*args)
        if before or rng.random() < 0.05:
            counts[name] += 1
            raise Interrupted(name)
        return found

    return attempt


def test_windows_of_gemma_make_room_for_four_times_the_requests():
    config = config_from_hf(SHAPES["gemma-3-12b"])
    plain = replace(config, attention=tuple(spec._replace(window=None) for spec in config.attention))
    numbers = [
        make_tables(rank_ladder(PRESETS["bf16"], each, 1, torch.bfloat16, 32768).spec, 80 << 30).max_requests(32768, 0)
        for each in (config, plain)
    ]
    assert numbers[0] >= 4 * numbers[1] > 0


def test_windows_keep_eight_bits_unless_asked_for_fewer():
    layers = [LayerKV(2, 64), LayerKV(2, 64, 1000)]
    full, window = ladder_of_layers(PRESETS["auto"], layers, torch.bfloat16).groups
    assert window.visible == 1000 and all(rung.bits >= 8 for rung in window.rungs)
    assert len(window.floors) == len(full.rungs) and window.floors[-1] == len(window.rungs) - 1
    narrow = ladder_of_layers(replace(PRESETS["auto"], narrow_windows=True), layers, torch.bfloat16).groups[1]
    assert [rung.name for rung in narrow.rungs] == [rung.name for rung in full.rungs]
    assert len(ladder_of_layers(PRESETS["int4"], layers, torch.bfloat16).groups[1].rungs) == 1


def test_patterns_under_a_window_are_refused():
    layers = [LayerKV(2, 64), LayerKV(2, 64, 1000)]
    full, window = ladder_of_layers(PRESETS["patternkv"], layers, torch.bfloat16).groups
    assert full.spec.has_bank and not window.spec.has_bank
    with pytest.raises(ConfigError, match=r"kv='patternkv'.*window of 1,000"):
        ladder_of_layers(replace(PRESETS["patternkv"], narrow_windows=True), layers, torch.bfloat16)
