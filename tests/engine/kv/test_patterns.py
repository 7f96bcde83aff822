"""Banks and codes of requests as scheduler and cache make them: equal alone, in any batch, and computed again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from qkv_engine.config import BLOCK_TOKENS, KVConfig, RungConfig
from qkv_engine.kernels.formats.pattern.presets import pattern_rung
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.kernels.mine.kmeans import kmeans
from qkv_engine.request import FinishReason

from .pattern_loop import HEAD_DIM, KV_HEADS, LAYERS, VOCAB_SIZE, PatternLoop, Snapshot, kv_of

DENSE = RungConfig("dense32", "dense32", "dense32")
NUM_PATTERNS = 34
EAGER = KVConfig(name="eager", rungs=(DENSE, pattern_rung(2, NUM_PATTERNS)), recent=128, eager=True)
LATER = replace(EAGER, name="later", rungs=(DENSE, pattern_rung(2, 30, 3)))
PRESSURE = KVConfig(name="pressure", rungs=(DENSE, pattern_rung(4, NUM_PATTERNS), pattern_rung(2, NUM_PATTERNS)))
LENGTHS = (1, 31, 32, 127, 128, 129, 300)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def alone(kv: KVConfig, length: int, max_tokens: int, seed: int = 0) -> Snapshot:
    loop = PatternLoop(kv)
    loop.add("a", prompt(length, seed), max_tokens)
    return loop.run()["a"]


def patterns_of(snapshot: Snapshot) -> torch.Tensor:
    """The bank as [layers, 2, patterns, H, D] float32."""
    assert snapshot.bank is not None
    bank = torch.frombuffer(bytearray(snapshot.bank), dtype=torch.float16).float()
    return bank.view(LAYERS, 2, -1, KV_HEADS, HEAD_DIM)


@pytest.mark.parametrize("sink", [0, 32])
@pytest.mark.parametrize("length", LENGTHS)
def test_bank_and_codes_are_what_the_request_says(length: int, sink: int):
    """Patterns are those of the prompt, or of the first block, and codes those of the reference."""
    kv = replace(EAGER, sink=sink)
    found = alone(kv, length, 700 - length)
    ladder = PatternLoop(kv).cache.ladder
    number, behind = max(BLOCK_TOKENS, length - sink), (699 - 128 - sink) // BLOCK_TOKENS
    bank = patterns_of(found)
    assert [rung for rung, _ in found.blocks] == [1] * behind
    tokens = torch.stack([kv_of(found.token_ids, p) for p in range(sink, 699)])  # [n, layers, 2, H, D]
    heads = tokens[:number].permute(1, 2, 3, 0, 4).flatten(0, 2)
    expected = kmeans(heads, NUM_PATTERNS).view(LAYERS, 2, KV_HEADS, NUM_PATTERNS, HEAD_DIM).transpose(2, 3)
    torch.testing.assert_close(bank[:, :, :NUM_PATTERNS], expected, rtol=2e-3, atol=2e-3)
    assert not bank[:, :, NUM_PATTERNS:].any()
    for index in range(behind):
        mine = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        for i, side in enumerate(ladder.narrowest.layout.sides):
            patterns = bank[i // 2, i % 2].half().reshape(1, -1).view(torch.uint8)
            x = mine[:, i // 2, i % 2].transpose(0, 1)[None]
            expected_rows = side.family.quantize(x, side, patterns)
            codes, meta = found.blocks[index][1][2 * i : 2 * i + 2]
            assert codes == expected_rows.codes.numpy().tobytes() and meta == expected_rows.meta.numpy().tobytes()


@pytest.mark.parametrize("length", [1, 129, 300])
def test_windows_of_the_reply_add_the_middle_of_their_ranges(length: int):
    """Codes are the reference's for the patterns that were there when the window was sealed, its own included."""
    found = alone(LATER, length, 900 - length)
    ladder, first, tokens = PatternLoop(LATER).cache.ladder, max(1, length // BLOCK_TOKENS), found.token_ids
    kv = torch.stack([kv_of(tokens, p) for p in range(899)])  # [n, layers, 2, H, D]
    blocks = [kv[i : i + BLOCK_TOKENS] for i in range(0, 6 * BLOCK_TOKENS, BLOCK_TOKENS)]
    bank = patterns_of(found)
    centres = torch.stack([(block.amin(0) + block.amax(0)) / 2 for block in blocks[first : first + 3]], 2)
    torch.testing.assert_close(bank[:, :, 30:33], centres, rtol=1e-3, atol=1e-3)
    plain = alone(replace(LATER, rungs=(DENSE, pattern_rung(2, 30))), length, 900 - length)
    assert torch.equal(bank[:, :, :30], patterns_of(plain)[:, :, :30])
    for index, block in enumerate(blocks):
        visible = 30 + min(max(0, index + 1 - first), 3)
        for i, side in enumerate(ladder.narrowest.layout.sides):
            patterns = bank[i // 2, i % 2, :visible].half().reshape(1, -1).view(torch.uint8)
            expected = side.family.quantize(block[:, i // 2, i % 2].transpose(0, 1)[None], side, patterns)
            codes, meta = found.blocks[index][1][2 * i : 2 * i + 2]
            assert codes == expected.codes.numpy().tobytes() and meta == expected.meta.numpy().tobytes()


def test_later_patterns_do_not_depend_on_batches_or_preemption():
    lengths = (1, 129, 300, 520)
    expected = {length: alone(LATER, length, 500) for length in lengths}
    for seqs, budget in ((4, 512), (2, 77)):
        loop = PatternLoop(LATER, 100, seqs=seqs, budget=budget)
        requests = [loop.add(str(length), prompt(length), 500) for length in lengths]
        for _ in range(350):
            loop.step()
        for request in [request for request in reversed(requests) if request in loop.scheduler.running]:
            loop.scheduler._preempt(request)
        assert {int(name): snapshot for name, snapshot in loop.run().items()} == expected
        assert sum(request.num_preemptions for request in requests) >= 2


@pytest.mark.parametrize("sink", [0, 32])
def test_a_request_has_the_same_bytes_alone_and_in_any_batch(sink: int):
    kv = replace(EAGER, sink=sink)
    expected = {length: alone(kv, length, 300) for length in LENGTHS}
    for seqs, budget in ((16, 512), (3, 77), (5, 160)):
        loop = PatternLoop(kv, 100, seqs=seqs, budget=budget)
        for length in LENGTHS:
            loop.add(str(length), prompt(length), 300)
        found = loop.run()
        assert {int(name): snapshot for name, snapshot in found.items()} == expected
    assert loop.cache.tables.store.num_demotions["dense32", "int2-patterns"] >= 10


def test_a_request_computed_again_has_the_same_bytes():
    """After a preemption its output is computed with its prompt; patterns are mined from the prompt alone."""
    expected = [alone(EAGER, length, 400) for length in (300, 129)]
    loop = PatternLoop(EAGER)
    requests = [loop.add(str(length), prompt(length), 400) for length in (300, 129)]
    for _ in range(200):
        loop.step()
    banks = [loop.cache.tables.main[request.request_id].bank for request in requests]
    for request in reversed(requests):
        loop.scheduler._preempt(request)
    assert loop.cache.arena.used_nbytes == 0
    found = loop.run()
    assert [found["300"], found["129"]] == expected and [r.num_preemptions for r in requests] == [1, 1]
    assert all(bank is not None and bank.is_mined for bank in banks)


def test_recovery_mines_banks_anew():
    expected = [alone(EAGER, length, 300, seed) for seed, length in enumerate((300, 129))]
    loop = PatternLoop(EAGER)
    for seed, length in enumerate((300, 129)):
        loop.add(str(seed), prompt(length, seed), 300)
    for _ in range(160):
        loop.step()
    old = [loop.cache.tables.main[name].bank for name in "01"]
    loop.cache.reset()
    loop.cache.memory.fill_(0xFF)
    loop.scheduler.recover(loop.space())
    loop.step()
    assert [loop.cache.tables.main[name].bank is bank for name, bank in zip("01", old, strict=True)] == [False, False]
    found = loop.run()
    assert [found["0"], found["1"]] == expected


def test_pressure_takes_blocks_down_both_steps():
    """Codes at 2 bits are the same by way of 4, and as if sealed at once."""
    loop = PatternLoop(PRESSURE, 13, budget=128)
    for seed in range(6):
        loop.add(str(seed), prompt(400, seed), 150)
    found, demotions = loop.run(), loop.cache.tables.store.num_demotions
    assert demotions["dense32", "int4-patterns"] > 10 < demotions["int4-patterns", "int2-patterns"]
    checked = 0
    for seed in range(6):
        straight = alone(replace(EAGER, recent=0), 400, 150, seed)
        if found[str(seed)].bank != straight.bank:
            continue  # mined before its prompt was computed
        for (rung, sides), (_, others) in zip(found[str(seed)].blocks, straight.blocks, strict=False):
            if rung == 2:
                assert sides == others
                checked += 1
    assert checked > 3


def test_a_prompt_sealed_before_it_is_computed_is_mined_as_far_as_it_is():
    loop = PatternLoop(PRESSURE, 12, budget=128)
    loop.add("old", prompt(1, 1), 900)
    loop.add("long", prompt(1500), 1)
    bank = None
    while bank is None or not bank.is_mined:
        loop.step()
        bank = loop.cache.tables.main["long"].bank if "long" in loop.cache.tables else None
    number = bank.num_computed_tokens
    assert BLOCK_TOKENS <= number < 1400
    part = PatternLoop(EAGER)
    part.add("part", prompt(1500)[:number], 300)
    assert loop.run()["long"].bank == part.run()["part"].bank


def test_abort_frees_the_bank():
    loop = PatternLoop(EAGER)
    request, other = loop.add("a", prompt(300), 300), loop.add("b", prompt(200), 300)
    for _ in range(50):
        loop.step()
    bank = loop.cache.ladder.main.slots[-1].nbytes
    assert loop.cache.arena.live[bank] == 2 and loop.cache.bytes_in_use()["meta"] >= 2 * bank
    loop.scheduler.finish(request, FinishReason.ABORT)
    assert loop.cache.arena.live[bank] == 1
    loop.scheduler.finish(other, FinishReason.ABORT)
    assert loop.cache.arena.used_nbytes == 0 and not +loop.cache.bytes_in_use()


@pytest.mark.parametrize("kv", [EAGER, KVConfig(name="plain", rungs=(DENSE, uniform_rung(2)), eager=True)])
def test_prefixes_are_shared_by_other_ladders_alone(kv: KVConfig):
    loop = PatternLoop(kv)
    loop.add("a", prompt(400), 5)
    loop.run()
    again = loop.add("b", prompt(400), 5)
    loop.run()
    assert again.num_cached_tokens == (0 if kv is EAGER else 384)
    assert loop.ended["a"][1:] == loop.ended["b"][1:] or kv is not EAGER


def test_values_that_are_not_finite_fail_their_request_alone():
    loop = PatternLoop(EAGER, budget=700)
    bad, good = loop.add("bad", prompt(300), 5), loop.add("good", prompt(300, 1), 5)
    loop.step()
    loop.element(bad, 3).fill_(float("inf"))
    loop.scheduler.schedule()
    found = loop.cache.apply_moves(loop.mover)
    assert found == {loop.cache.tables.main["bad"].blocks[0]}
    bank = loop.snapshot(good).bank
    assert bank == alone(EAGER, 300, 5, 1).bank
    assert patterns_of(loop.snapshot(bad)).isfinite().all()
