"""Pattern sides of the tests: banks, tokens around patterns, and dense blocks of a request to be sealed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qkv_engine.kernels.formats import BlockLayout, PageShape, SideBytes, make_format
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.pattern import PatternSide
from qkv_engine.kernels.formats.pattern import reference as pattern
from qkv_engine.kernels.mine import mine
from qkv_engine.kernels.step_down import transfer

BF16 = torch.bfloat16
T = 128
SIDES: tuple[SideName, SideName] = ("k", "v")


def side_of(
    name: SideName, number: int, bits: int = 2, head_dim: int = 64, heads: int = 2, group: int = 128
) -> PatternSide:
    fmt = make_format(f"int{bits}-{'channel' if name == 'k' else 'token'}-{group}-patterns{number}", BF16)
    found = fmt.layout(PageShape(heads, T, head_dim), name)
    assert isinstance(found, PatternSide)
    return found


def bank_of(patterns: Tensor, side: PatternSide) -> Tensor:
    """The bytes of patterns [n, M, H, D], and zeros behind them."""
    rows = patterns.half().flatten(1).view(torch.uint8)
    return torch.cat((rows, rows.new_zeros(len(rows), side.bank_nbytes - rows.shape[1])), 1)


def clustered(number: int, blocks: int = 3, noise: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens [blocks, 2, T, 64] around patterns [1, number, 2, 64]."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(1, number, 2, 64, generator=generator).half()
    at = torch.randint(number, (blocks, 2, T), generator=generator)
    heads = torch.arange(2)[None, :, None]
    x = patterns[0].float()[at, heads] + noise * torch.randn(blocks, 2, T, 64, generator=generator)
    return x.bfloat16().float(), patterns


def index_of(rows: SideBytes, side: PatternSide) -> Tensor:
    return pattern.read_index(rows, side)


def layouts(number: int, num_layers: int = 2, bits: int = 2, later: int = 0) -> tuple[BlockLayout, BlockLayout]:
    """Dense blocks and blocks with patterns."""
    shape = PageShape(2, T, 64)
    source = BlockLayout.stack(Dense("dense", BF16).layout(shape, name) for _ in range(num_layers) for name in SIDES)
    sides = (replace(side_of(name, number, bits), later=later) for _ in range(num_layers) for name in SIDES)
    return source, BlockLayout.stack(sides)


class Arena:
    """Dense blocks of a request, slots to seal them to, and its bank, among NaNs."""

    def __init__(self, number: int, num_blocks: int = 4, seed: int = 0, later: int = 0):
        self.source, self.target = layouts(number, later=later)
        unit = 64 * 2
        slot = -(-self.source.nbytes // unit) * unit
        order = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(seed)) * slot
        self.src, self.dst = order.view(2, num_blocks)
        self.bank = 2 * num_blocks * slot
        self.memory = torch.full((self.bank + self.target.bank_nbytes,), 255, dtype=torch.uint8)
        self.x = torch.stack([clustered(7, blocks=num_blocks, seed=4 * seed + i)[0] for i in range(4)], 1).bfloat16()
        for address, x in zip(self.src.tolist(), self.x, strict=True):
            self.memory[address : address + self.source.nbytes] = x.reshape(-1).view(torch.uint8)

    def mine(self, num_tokens: int) -> None:
        mine(self.memory, self.src.tolist(), num_tokens, self.bank, self.source, self.target)

    def patterns(self, index: int) -> Tensor:
        """[H, M, D] of a side."""
        side, first = self.target.sides[index], self.bank + self.target.bank_offsets[index]
        assert isinstance(side, PatternSide)
        return pattern.read_patterns(self.memory[None, first : first + side.bank_nbytes], side)[0]

    def seal(self, blocks: list[int], num_windows: list[int] | None = None) -> Tensor:
        finite = torch.ones(len(blocks), dtype=torch.int64, device=self.memory.device)
        banks, windows = torch.full_like(finite, self.bank), torch.tensor(num_windows or [0] * len(blocks))
        where = self.src[blocks], self.dst[blocks], self.source, self.target
        transfer(self.memory, *where, finite, banks, windows.to(finite.device))
        return finite
