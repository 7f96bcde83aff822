"""An arena with dense blocks to seal, for the tests of page formats; every other byte is 0xFF, which reads as NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.formats import (
    BlockLayout,
    Family,
    Format,
    PageShape,
    Place,
    Side,
    SideBytes,
    narrower_formats,
)
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.uniform.layout import AXES, GROUPS, Uniform

HEAD_DIMS = (64, 80, 96, 128, 256)
SIDES: tuple[SideName, SideName] = ("k", "v")


@dataclass
class Blocks:
    """``x`` [n, sides, H, T, D] lies at ``src`` in ``memory``; slots of ``target`` are free at ``dst`` and ``next``."""

    memory: Tensor
    x: Tensor
    src: Tensor
    dst: Tensor
    next: Tensor
    source: BlockLayout
    target: BlockLayout
    banks: Tensor | None


def all_sides(bits: int, shape: PageShape) -> list[Side]:
    """Every axis, group and orientation of ``bits``-bit pages."""
    formats = [Uniform(bits, axis, group) for axis in AXES for group in GROUPS]
    return [fmt.layout(shape, side) for fmt in formats for side in ("k", "v")]


def format_sides(fmt: Format, shape: PageShape) -> list[Side]:
    """K and V of a format, each where it can take ``shape``."""
    found: list[Side] = []
    for name in SIDES:
        with suppress(ConfigError):
            found.append(fmt.layout(shape, name))
    return found


def family_sides(family: Family, shape: PageShape, dtype: torch.dtype = torch.bfloat16) -> list[Side]:
    """K and V of every format of a family, each where it can take ``shape``."""
    return [side for fmt in family.formats(dtype).values() for side in format_sides(fmt, shape)]


def family_steps(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Each side of codes paired with itself and with every side that it can step down to."""
    sealed = [old for old in sides if old.dense_dtype is None]
    narrower = [(old, fmt.layout(old.shape, old.name)) for old in sealed for fmt in narrower_formats(old)]
    return [*zip(sealed, sealed, strict=True), *narrower]


def lay_apart(sides: Sequence[Side]) -> BlockLayout:
    """The codes of all sides, then their metadata from the last side's to the first's, with gaps between them."""
    end, places = 16, {}
    for i, side in enumerate(sides):
        places[i] = end if side.dominant is None else places[i - 2]
        end += side.codes_nbytes + 48
    metas = {}
    for i in reversed(range(len(sides))):
        metas[i] = end
        end += -(-sides[i].meta_nbytes // 16) * 16 + 32
    return BlockLayout(tuple(sides), tuple(Place(places[i], metas[i]) for i in range(len(sides))), end)


def make_blocks(
    sides: Sequence[Side],
    shape: PageShape,
    *,
    num_blocks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    x: Tensor | None = None,
    seed: int = 0,
    lay_out: Callable[[Sequence[Side]], BlockLayout] = BlockLayout.stack,
) -> Blocks:
    """Blocks of random values (or ``x``) in slots of random order, 16-byte aligned."""
    generator = torch.Generator().manual_seed(seed)
    extent = (num_blocks, len(sides), shape.num_kv_heads, shape.num_tokens, shape.head_dim)
    if x is None:
        x = torch.randn(extent, generator=generator) * torch.rand(extent[-1], generator=generator) * 3
    x = x.to(dtype).expand(extent).contiguous()
    source = BlockLayout.stack(Dense("dense", dtype).layout(shape, side.name) for side in sides)
    target = lay_out(sides)
    spans = [source.nbytes] * num_blocks + [target.nbytes] * (2 * num_blocks)
    bank, bank_nbytes, end = 48, target.bank_nbytes, 48 + -(-target.bank_nbytes // 16) * 16 + 48
    addresses = [0] * len(spans)
    for i in torch.randperm(len(spans), generator=generator).tolist():
        addresses[i] = end
        end += -(-spans[i] // 16) * 16 + 48
    memory = torch.full((end,), 255, dtype=torch.uint8)
    for address, block in zip(addresses, x, strict=False):
        memory[address : address + source.nbytes] = block.reshape(-1).view(torch.uint8)
    src, dst, following = torch.tensor(addresses).view(3, num_blocks)
    if bank_nbytes:
        _fill_bank(memory[bank : bank + bank_nbytes], target, generator)
    return Blocks(
        memory, x, src, dst, following, source, target, torch.full((num_blocks,), bank) if bank_nbytes else None
    )


def _fill_bank(bank: Tensor, layout: BlockLayout, generator: torch.Generator) -> None:
    """Random patterns up to each side's number, two of them equal; the others are zeros."""
    bank.zero_()
    for side, offset in zip(layout.sides, layout.bank_offsets, strict=True):
        patterns = torch.randn(side.num_patterns + side.num_later, side.pattern_nbytes // 2, generator=generator).half()
        patterns[1::7] = patterns[:1]
        bank[offset : offset + patterns.nbytes] = patterns.view(torch.uint8).flatten()


def sow_odd(blocks: Blocks) -> Blocks:
    """Writes values that trip quantizers into the last block: NaN, infinity, -0, no range, tiny and huge values."""
    elements = slot(blocks.memory, blocks.src[-1], blocks.source).view(blocks.x.dtype).view(blocks.x.shape[1:])
    elements[0, 0, 3, 2], elements[-1, -1, 4, 3] = float("nan"), float("-inf")
    elements[:, 0, 5], elements[:, 0, 8], elements[:, 0, 11] = -0.0, 1e-7, 1e-30
    elements[:, 0, :, 1] = 0.123
    elements[1::2, -1, 6:8] = 60000
    return blocks


def slot(memory: Tensor, address: Tensor | int, layout: BlockLayout) -> Tensor:
    """The bytes of one block."""
    return memory[int(address) : int(address) + layout.nbytes]


def written(layout: BlockLayout) -> Tensor:
    """Mask of the bytes of a slot that belong to codes or metadata: [nbytes] bool."""
    mask = torch.zeros(layout.nbytes, dtype=torch.bool)
    for side, place in zip(layout.sides, layout.places, strict=True):
        mask[place.codes : place.codes + side.codes_nbytes] = True
        mask[place.meta : place.meta + side.meta_nbytes] = True
    return mask


def side_rows(memory: Tensor, addresses: Tensor, layout: BlockLayout, index: int, bank: int | None = None) -> SideBytes:
    """Copies of the codes and the metadata of one side of the blocks at ``addresses``, and of its patterns, if any."""
    side, place = layout.sides[index], layout.places[index]
    starts = addresses.tolist()
    sizes = zip(place, (side.codes_nbytes, side.meta_nbytes), strict=True)
    rows = SideBytes(*(torch.stack([memory[a + at : a + at + nbytes] for a in starts]) for at, nbytes in sizes))
    if bank is None or not side.bank_nbytes:
        return rows
    first = bank + layout.bank_offsets[index]
    return rows._replace(bank=memory[first : first + side.bank_nbytes].expand(len(starts), -1))
