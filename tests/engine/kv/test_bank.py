"""The books of banks of patterns: what is mined and when, where a bank lies, and which ladders have one."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.device.layouts import Ladder, build_ladder
from qkv_engine.errors import ConfigError
from qkv_engine.kernels.block_tables import RUNG_BITS
from qkv_engine.kernels.formats.pattern.presets import pattern_rung
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.kv.bank import Centres, Mining
from qkv_engine.kv.block import Move
from qkv_engine.kv.spec import KVSpec
from qkv_engine.kv.table import BlockTables

from ...scheduler.common import BANK, BLOCK, RUNGS, make_request, make_space, make_spec
from .copies import Copy

ALONE = make_spec(RUNGS, others=(BANK,), has_bank=True)
BESIDE = make_spec(RUNGS, sink=32, sink_nbytes=4, others=(BANK,), has_bank=True)
each_ladder = pytest.mark.parametrize("ladder", (ALONE, BESIDE), ids=("alone", "beside a sink"))


def opened(ladder: KVSpec, num_prompt_tokens: int, num_blocks: int, num_computed: int | None = None) -> BlockTables:
    """Tables of a request "a" of some blocks, all computed unless told otherwise."""
    tables = make_space(40, ladder).tables
    num_tokens = ladder.main.sink + num_blocks * BLOCK
    tables.open("a", 2, num_prompt_tokens=num_prompt_tokens)
    assert tables.reserve("a", num_tokens)
    tables.coldest("a", num_tokens if num_computed is None else num_computed)
    return tables


def moves(tables: BlockTables) -> list[Move]:
    return [move for wave in tables.store.waves for move in wave]


@each_ladder
@pytest.mark.parametrize("prompt", [0, 1, 127, 128, 129, 300, 1280, 5000])  # tokens behind a sink
def test_the_prompt_is_mined_with_the_first_seal(ladder: KVSpec, prompt: int):
    tables = opened(ladder, ladder.main.sink + prompt, 10)
    blocks, bank = tables.main["a"].blocks, tables.main["a"].slots[-1].slot.address
    addresses = [block.slot.address for block in blocks]
    for first, last in ((2, 5), (0, 2), (5, 10)):  # in any order
        assert tables.demote([(block, 1) for block in blocks[first:last]]) == last - first
    number = min(max(prompt, BLOCK), 10 * BLOCK)
    assert [move.bank for move in moves(tables)] == [bank] * 10
    mined = [move.mining for move in moves(tables)]
    assert mined == [Mining(addresses[: -(-number // BLOCK)], number)] + [None] * 9
    tables.check_integrity()


def test_a_prompt_in_the_sink_alone_is_mined_from_the_first_block():
    tables = opened(BESIDE, 20, 2)
    first = tables.main["a"].blocks[0]
    address = first.slot.address
    assert tables.demote([(first, 2)]) == 1
    assert [move.mining for move in moves(tables)] == [Mining([address], BLOCK)]


@each_ladder
def test_under_pressure_the_prompt_is_mined_as_far_as_it_is_computed(ladder: KVSpec):
    tables = opened(ladder, ladder.main.sink + 9 * BLOCK, 9, num_computed=ladder.main.sink + 2 * BLOCK + 50)
    blocks = tables.main["a"].blocks
    addresses = [block.slot.address for block in blocks]
    tables.demote([(blocks[0], 1), (blocks[1], 1)])
    tables.coldest("a", ladder.main.sink + 9 * BLOCK)
    tables.demote([(block, 1) for block in blocks[2:]])
    assert [move.mining for move in moves(tables)] == [Mining(addresses[:3], 2 * BLOCK + 50)] + [None] * 8


def test_a_step_down_of_codes_needs_no_bank():
    tables = opened(ALONE, 300, 3)
    blocks = tables.main["a"].blocks
    tables.demote([(block, 1) for block in blocks])
    tables.store.waves.clear()
    assert tables.demote([(blocks[2], 2), (blocks[0], 2)]) == 2
    assert all(move.bank is None and move.mining is None for move in moves(tables))


@pytest.mark.parametrize(("prompt", "first"), [(0, 1), (128, 1), (255, 1), (256, 2), (300, 2), (1100, 8)])
def test_windows_after_the_prompt_add_their_centres_in_any_order(prompt: int, first: int):
    """A block may choose from the patterns of its own window and those before, and no window adds a pattern twice."""
    ladder = make_spec(RUNGS, sink=32, sink_nbytes=4, others=(BANK,), has_bank=True, num_windows=4)
    for order in ((range(10),), ([9], [3], [2, 5, 0], [8, 7, 6, 4, 1])):
        tables = opened(ladder, ladder.main.sink + prompt, 10)
        blocks = tables.main["a"].blocks
        addresses = [block.slot.address for block in blocks]
        for some in order:
            assert tables.demote([(blocks[index], 1) for index in some]) == len(some)
        found = moves(tables)
        assert {move.src: move.num_windows for move in found} == {
            address: min(max(0, index + 1 - first), 4) for index, address in enumerate(addresses)
        }
        centres = [move.centres for move in found if move.centres is not None]
        assert [address for window in centres for address in window.addresses] == addresses[first : first + 4]
        assert centres[0].first == 0 and sum(len(window.addresses) for window in centres) == min(4, 10 - first)
    assert centres == [Centres(0, addresses[first : first + 4])]  # one early seal needs them all


def test_a_bank_is_read_where_it_lies_when_the_wave_runs():
    tables = make_space(40, ALONE).tables
    for name in "abcdef":  # five banks a slab
        tables.open(name, 2, num_prompt_tokens=BLOCK)
        assert tables.reserve(name, 3 * BLOCK)
        tables.coldest(name, 3 * BLOCK)
    tables.store.take_fresh()
    blocks, bank = tables.main["f"].blocks, tables.main["f"].slots[-1]
    tables.demote([(blocks[0], 1)])
    tables.release("a")
    before = bank.slot.address
    while tables.store._evacuate():
        pass
    assert bank.slot.address != before
    tables.demote([(blocks[1], 1)])
    assert [move.bank for move in moves(tables) if move.bank is not None] == [before, bank.slot.address]
    copies = [move for move in moves(tables) if move.block is bank]
    assert [(move.src, move.dst, move.bank) for move in copies] == [(before, bank.slot.address, None)]


@each_ladder
def test_the_device_finds_the_bank_at_the_end_of_the_row(ladder: KVSpec):
    tables = make_space(40, ladder).tables
    copy = Copy(tables, 8, 6 * BLOCK)
    names = "abcdef"
    for name in names:
        tables.open(name, 2, num_prompt_tokens=1)
        assert tables.reserve(name, ladder.main.sink + BLOCK)
    rows = copy.follow(tables, names)
    assert copy.groups[0].banks(rows).tolist() == [tables.main[name].slots[-1].slot.address for name in names]
    tables.release("a")
    while tables.store._evacuate():
        pass
    assert tables.reserve("f", ladder.main.sink + 6 * BLOCK)
    rows = copy.follow(tables, names[1:])
    assert copy.groups[0].banks(rows).tolist() == [tables.main[name].slots[-1].slot.address for name in names[1:]]
    words = copy.block_words[0]
    assert words.has_bank and copy.groups[0].entries(rows[-1:], 6)[0].tolist() == [
        [block.slot.address for block in tables.main.entries(tables.main["f"])[:6]]
    ]
    last = copy.words[copy.layout.sections[0].first(rows[-1]) + words.width - 1]
    assert copy.words[last] == tables.main["f"].slots[-1].slot.address << RUNG_BITS
    plain = Copy(make_space(8).tables, 2, BLOCK)
    assert not plain.block_words[0].has_bank and plain.groups[0].banks([0]) is None


@each_ladder
def test_nothing_is_shared(ladder: KVSpec):
    space = make_space(40, ladder, prefix=True)
    for name in "ab":
        request = make_request(name, [1] * (ladder.main.sink + 2 * BLOCK + 1))
        assert space.open(request) == 0 and space.reserve(request, request.num_tokens)
        space.computed(request, request.num_tokens)
    assert not set(space.tables.main["a"]) & set(space.tables.main["b"])
    for name in "ab":
        space.tables.release(name)
    assert space.tables.arena.used_nbytes == 0


# ---- ladders


def build(*rungs: RungConfig, sink: int = 0, dtype: torch.dtype = torch.bfloat16) -> Ladder:
    config = KVConfig(name="patterns", rungs=(DENSE16, *rungs), sink=sink)
    return build_ladder(config, num_layers=2, num_kv_heads=3, head_dim=64, dtype=dtype)


@pytest.mark.parametrize("sink", [0, 32])
def test_a_ladder_with_patterns_has_a_slot_for_them(sink: int):
    ladder = build(pattern_rung(4), pattern_rung(2), sink=sink)
    assert ladder.spec.main.has_bank and [slot.name for slot in ladder.main.slots] == ["sink", "bank"][not sink :]
    bank = ladder.main.slots[-1]
    assert bank.num_tokens == bank.num_elements == 0
    assert (
        bank.nbytes == 2 * 2 * 32 * 3 * 64 * 2 == ladder.widest.block_nbytes // 4
    )  # layers, sides, patterns, heads, channels, fp16
    assert not build(uniform_rung(4), sink=sink).spec.main.has_bank
    later = build(pattern_rung(4, 32, 20), pattern_rung(2, 32, 20), sink=sink)
    assert (ladder.spec.main.num_windows, later.spec.main.num_windows) == (0, 20) and later.main.slots[
        -1
    ].nbytes == 2 * bank.nbytes


def test_banks_that_cannot_be():
    with pytest.raises(ConfigError, match=r"kv='patterns'.*patterns=200.*a dense block.*at most 128"):
        build(pattern_rung(2, 200))
    with pytest.raises(ConfigError, match=r"patterns=160: those of a request take.*at most 128"):
        build(pattern_rung(2, 32, 128))
    with pytest.raises(ConfigError, match=r"patterns=300: not a number of patterns"):
        build(pattern_rung(2, 100, 200))
    with pytest.raises(ConfigError, match=r"rung='int2-patterns'.*keeps the number of patterns, 32 and 8 later ones"):
        build(pattern_rung(4, 32, 8), pattern_rung(2, 32))
    assert build(pattern_rung(2, 128)).main.slots[0].nbytes == build(pattern_rung(2)).widest.block_nbytes
    for number in (0, 256, 1000):
        with pytest.raises(ConfigError, match=rf"patterns={number}.*1 to 255 together"):
            build(pattern_rung(2, number))
    with pytest.raises(ConfigError, match=r"rung='int2-patterns'.*keeps the number of patterns, 32 and 0"):
        build(pattern_rung(4), pattern_rung(2, 16))
    mixed = RungConfig("mixed", "int2-channel-128-patterns32", "int2-token-128-patterns16")
    assert build(mixed).main.slots[0].nbytes == 2 * (32 + 16) * 3 * 64 * 2
    late = RungConfig("late", ("dense16", "int4-channel-128"), "int4-token-128")
    with pytest.raises(ConfigError, match=r"rung='int2-patterns'.*from uniform"):
        build(late, pattern_rung(2))
    above = RungConfig("above", ("dense16", "int4-channel-128"), "int4-token-128")
    below = RungConfig("below", ("int4-channel-128-patterns8", "int2-channel-128"), "int2-token-128")
    with pytest.raises(ConfigError, match=r"rung='below'.*not those of rung above.*all rungs but the first"):
        build(above, below)
